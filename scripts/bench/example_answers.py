"""How many models that people train get an answer by `auto` before anything is trained: example_answers.json.

    python scripts/bench/example_answers.py                  # every model that has no row yet
    python scripts/bench/example_answers.py --only ddpm,swin # these again

An answer counts where it comes from the step itself ("graph" or "xla"), without running one. Keras's published examples
are rebuilt at small size in zoo_vision.py, zoo_language.py and zoo_steps.py, those that train without `fit` in
zoo_loops.py; keras.applications are those of the installed Keras. Backbones of keras-hub (zoo_hub.py) are asked where
that is installed, which kerasmem does not need.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections import Counter
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
        function: its function there.
        batch: samples in a batch.
        options: arguments of `kerasmem.estimate` that a user of this example would have to give.
    """

    module: str
    function: str
    batch: int = 8
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What it is one of."""
        kinds = {"keras.applications": "applications", "zoo_hub.py": "hub", "zoo_loops.py": "loops"}
        return kinds.get(self.module, "examples")

    @property
    def source(self) -> str:
        """The model as `kerasmem.estimate` takes it."""
        return f"{self.module if self.module.startswith('keras.') else HERE / self.module}:{self.function}"


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
_LOOPS: dict[str, dict[str, Any]] = {
    "from_scratch": {"target_shape": "():int32"},
    "compiled_by_xla": _shaped({"images": (32, 32, 3), "labels": (1,)}), "adversarial": _shaped({"real": (32, 32, 3)}),
    "neural_style": _shaped({"base": (96, 96, 3), "style": (96, 96, 3)}), "deep_dream": {},
    "actor_and_critic": _shaped({"state": (3,), "action": (1,), "reward": (1,), "after": (3,)}),
    "policy_gradient": _shaped({"observed": (4,), "action": "():int32", "likelihood": "()", "advantage": "()"}),
    "few_shots": _shaped({"images": (28, 28, 1), "labels": "():int32"}),
    "sums_of_gradients": {"target_shape": "():int32"},
}  # fmt: skip
_HUB = (
    "albert", "bert", "deberta_v3", "distil_bert", "electra", "esm", "f_net", "roberta", "roformer_v2", "xlm_roberta",
    "xlnet", "bloom", "falcon", "gemma", "gemma3", "gpt2", "gpt_neo_x", "gpt_oss", "llama", "mistral", "mixtral", "opt",
    "phi3", "qwen", "qwen3", "qwen_moe", "qwen3_moe", "smollm3", "rwkv7", "bart", "t5", "whisper", "deit",
    "densenet", "dinov2", "efficientnet", "hgnet_v2", "mit", "mobilenet", "resnet", "resnet_v2", "swin", "vgg", "vit",
    "vit_det", "xception", "deeplab_v3", "segformer", "retinanet", "depth_anything", "clip", "siglip",
    "pali_gemma",
)  # fmt: skip
_APPLICATIONS = (
    "ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtSmall", "ConvNeXtTiny", "ConvNeXtXLarge", "DenseNet121", "DenseNet169",
    "DenseNet201", "EfficientNetB0", "EfficientNetB1", "EfficientNetB2", "EfficientNetB3", "EfficientNetB4",
    "EfficientNetB5", "EfficientNetB6", "EfficientNetB7", "EfficientNetV2B0", "EfficientNetV2B1", "EfficientNetV2B2",
    "EfficientNetV2B3", "EfficientNetV2L", "EfficientNetV2M", "EfficientNetV2S", "InceptionResNetV2", "InceptionV3",
    "MobileNet", "MobileNetV2", "MobileNetV3Large", "MobileNetV3Small", "NASNetLarge", "NASNetMobile", "ResNet101",
    "ResNet101V2", "ResNet152", "ResNet152V2", "ResNet50", "ResNet50V2", "VGG16", "VGG19", "Xception",
)  # fmt: skip
_OPEN = {name: _shaped((224, 224, 3)) for name in ("MobileNetV3Large", "MobileNetV3Small")}


def _of_hub(name: str) -> Example:
    return Example("zoo_hub.py", "backbone", options={"factory_args": {"name": name}})


EXAMPLES: dict[str, Example] = {
    **{name: Example("zoo_vision.py", name, options=options) for name, options in _VISION.items()},
    **{name: Example("zoo_language.py", name, options=options) for name, options in _LANGUAGE.items()},
    **{name: Example("zoo_steps.py", name, options=options) for name, options in _STEPS.items()},
    **{f"loop/{name}": Example("zoo_loops.py", name, options=options) for name, options in _LOOPS.items()},
    **{f"hub/{name}": _of_hub(name) for name in _HUB},
    **{name: Example("keras.applications", name, 2, _OPEN.get(name, {})) for name in _APPLICATIONS},
}


def can_be_asked(name: str) -> bool:
    """Return whether what an example needs is installed."""
    return EXAMPLES[name].module != "zoo_hub.py" or importlib.util.find_spec("keras_hub") is not None


def answer(name: str, **more: Any) -> dict[str, Any]:
    """Return what `auto` says of an example, or why it says nothing."""
    import kerasmem

    example = EXAMPLES[name]
    try:
        report = kerasmem.estimate(example.source, batch_size=example.batch, **{**example.options, **more})
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
    return {
        "examples": len(rows), "answered": len(rows) - len(without), "share": 1 - len(without) / len(rows),
        "kinds": dict(Counter(EXAMPLES[name].kind for name in rows)), "unanswered": without,
        "not_asked": [name for name in EXAMPLES if name not in rows],
    }  # fmt: skip


def main() -> None:
    """Ask, and write after each answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of examples, with commas")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin none after so long")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    missing = [name for name in EXAMPLES if name not in rows and can_be_asked(name)]
    wanted = arguments.only.split(",") if arguments.only else missing
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
