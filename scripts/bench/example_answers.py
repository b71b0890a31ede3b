"""How many of Keras's published examples get an answer by `auto` before anything is trained: example_answers.json.

    python scripts/bench/example_answers.py                  # every example that has no row yet
    python scripts/bench/example_answers.py --only ddpm,swin # these again

An answer counts where it comes from the step itself ("graph" or "xla"), without running one. The examples are rebuilt
at small size in zoo_vision.py, zoo_language.py and zoo_steps.py; keras.applications are those of the installed Keras.
keras-hub is not among the packages that this needs; its backbones are not asked.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "example_answers.json"
WITHOUT_RUNNING = ("graph", "xla")


@dataclass(frozen=True)
class Example:
    """A model of an example.

    Attributes:
        module: the file in this folder that builds it, or "keras.applications".
        batch: samples in a batch.
        options: arguments of `kerasmem.estimate` that a user of this example would have to give.
    """

    module: str
    batch: int = 8
    options: dict[str, Any] = field(default_factory=dict)

    def source(self, name: str) -> str:
        """Return the model as `kerasmem.estimate` takes it."""
        return f"{self.module}:{name}" if self.module.startswith("keras.") else f"{HERE / self.module}:{name}"


def _shaped(shape: Any, **more: Any) -> dict[str, Any]:
    return {"input_shape": shape, **more}


_VISION: dict[str, dict[str, Any]] = {
    "image_from_scratch": {}, "patch_transformer": {}, "compact_transformer": {}, "convmixer": {}, "swin": {},
    "swin_plain_variables": {}, "mobilevit": {}, "involution": {}, "perceiver": _shaped((32, 32, 3)),
    "external_attention": {}, "multiple_instances": {}, "pets_unet": {}, "deeplab": {}, "fully_convolutional": {},
    "deep_supervision": {}, "super_resolution": _shaped((32, 32, 1)), "denoising_autoencoder": {}, "captcha_ocr": {},
    "retinanet": {"target_shape": (6804, 5)}, "box_transformer": {}, "keypoints": {}, "pointnet": {},
    "point_segmentation": {}, "tubelet_transformer": {}, "video_features": {}, "next_frame": {},
}  # fmt: skip
_LANGUAGE: dict[str, dict[str, Any]] = {
    "text_from_scratch": _shaped((128,)), "bidirectional_lstm": _shaped((64,)), "text_transformer": {},
    "switch_transformer": {}, "named_entities": {}, "translation": {}, "addition": {}, "question_answering": {},
    "sequence_to_sequence": _shaped(["source=16,64", "target=18,80"]),
    "miniature_gpt": {}, "tied_embeddings": _shaped("40:int32"), "fourier_network": {}, "gated_mlp": {},
    "wide_and_deep": {}, "tab_transformer": {}, "variable_selection": {},
    "collaborative_filtering": _shaped("2:int32"), "behaviour_sequence": {}, "decision_forest": {},
    "series_transformer": {}, "weather": {}, "anomaly_autoencoder": {}, "speaker_recognition": {},
    "speech_ctc": _shaped((100, 65), target_shape="20:int32"), "citations": _shaped("1:int32"),
    "graph_attention": _shaped("():int32", target_shape="():int32"), "molecules": {}, "traffic": {},
}  # fmt: skip
_STEPS: dict[str, dict[str, Any]] = {
    "vae": _shaped((28, 28, 1)), "dcgan": _shaped((32, 32, 3)), "wgan_gp": _shaped((28, 28, 1)),
    "ddpm": _shaped((32, 32, 3)), "ddim": _shaped((32, 32, 3)),
    "conditional_gan": _shaped((28, 28, 1), target_shape=(10,)),
    "cycle_gan": _shaped((32, 32, 3), target_shape=(32, 32, 3)), "vq_vae": _shaped((28, 28, 1)),
    "masked_autoencoder": _shaped((32, 32, 3)), "simsiam": _shaped((32, 32, 3), target_shape=(32, 32, 3)),
    "simclr": _shaped({"0": (32, 32, 3), "1": (32, 32, 3)}, target_shape="():int32"),
    "masked_language_model": _shaped("32:int32"),
    "siamese_triplets": _shaped({"0": (48, 48, 3), "1": (48, 48, 3), "2": (48, 48, 3)}),
    "metric_learning": _shaped((2, 32, 32, 3), target_shape="none"), "distillation": _shaped((28, 28, 1)),
    "zero_dce": _shaped((48, 48, 3)), "nerf": _shaped({"0": (16, 16, 3), "1": (16, 16, 8, 99)}),
    "real_nvp": _shaped((2,)), "two_learning_rates": {}, "gradient_accumulation": {},
    "dual_encoder": _shaped(["image=32,32,3", "caption=16:int32"]),
    "speech_transformer": _shaped(["source=64,40", "target=20:int32"]),
}  # fmt: skip
_APPLICATIONS = (
    "ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionResNetV2", "InceptionV3",
    "MobileNet", "MobileNetV2", "MobileNetV3Large",
    "MobileNetV3Small", "NASNetMobile", "ResNet50", "ResNet50V2", "VGG16", "VGG19",
    "Xception",
)  # fmt: skip

EXAMPLES: dict[str, Example] = {
    **{name: Example("zoo_vision.py", options=options) for name, options in _VISION.items()},
    **{name: Example("zoo_language.py", options=options) for name, options in _LANGUAGE.items()},
    **{name: Example("zoo_steps.py", options=options) for name, options in _STEPS.items()},
    **{name: Example("keras.applications", 2) for name in _APPLICATIONS},
}


def answer(name: str, **more: Any) -> dict[str, Any]:
    """Return what `auto` says of an example, or why it says nothing."""
    import kerasmem

    example = EXAMPLES[name]
    try:
        report = kerasmem.estimate(example.source(name), batch_size=example.batch, **{**example.options, **more})
    except kerasmem.KerasmemError as error:
        return {"method": None, "why": str(error).replace(f"{HERE}/", "")}
    return {
        "method": report.settings.method, "total": report.bytes.total, "low": report.bytes.low,
        "high": report.bytes.high, "optimizer": report.settings.optimizer,
        "unmodelled": [each.what for each in report.unmodelled], "why": "; ".join(report.notes),
    }  # fmt: skip


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how many examples have an answer that no step was run for, and what is said of the others."""
    without = {name: row["why"] for name, row in rows.items() if row["method"] not in WITHOUT_RUNNING}
    return {"examples": len(rows), "answered": len(rows) - len(without), "share": 1 - len(without) / len(rows),
            "unanswered": without}  # fmt: skip


def main() -> None:
    """Ask, and write after each answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of examples, with commas")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin none after so long")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    wanted = arguments.only.split(",") if arguments.only else [name for name in EXAMPLES if name not in rows]
    begin = time.monotonic()
    for name in wanted:
        if time.monotonic() - begin > arguments.seconds:
            break
        rows[name] = answer(name)
        print(name, rows[name]["method"], rows[name].get("total"), flush=True)
        if rows[name]["method"] not in WITHOUT_RUNNING:
            print("   ", rows[name]["why"][:600], flush=True)
        ordered = {each: rows[each] for each in EXAMPLES if each in rows}
        RESULTS.write_text(json.dumps({**summary(ordered), "rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
