#!/usr/bin/env python3
"""Compare kerasmem's figures for a GPU with the GPU itself, in minutes: Keras on JAX, without TensorFlow.

    python scripts/bench/gpu.py --output FILE [--seconds 330] [--only PART] [--rehearse]
    python scripts/bench/gpu.py --output scripts/bench/results/jax_estimates.json --cpu --seconds 3600

Each case has a process and a time limit of its own. Its result is written to FILE when it ends; finished cases are not
run again:

- plan: XLA's plan of a step for the card, made without the card by method "gpu-target";
- card: XLA's plan of the same step on the card, what autotuning took, the peak of steps, the driver's figure;
- product: `kerasmem.estimate` and `kerasmem.measure`;
- context, logger, oom, stream: memory of CUDA's context and libraries; `MemoryLogger`; `explain_oom` after a run past
  the limit; images a second from a file, in a training step, and both together.

It needs JAX and kerasmem's dependencies without TensorFlow. Plans are skipped without `kerasmem[gpu-targets]`. The exit
code is 1 if a case failed.

`--rehearse` runs a few small cases, on a CPU if there is no GPU. `--cpu` compares `estimate` with `measure` on the CPU.
JAX counts nothing there, so a process that really trains reports how much resident memory rose during a step, above the
live arrays before it: this includes kernel scratch of 64 KiB and more, but no machine code loaded in the first step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import ROOT, environment, run_python

Case = dict[str, Any]
ZOO = Path(__file__).with_name("zoo.py")
# Two batch sizes a network. Networks that XLA compiles slowly come first.
APPLICATIONS = {
    "EfficientNetB0": (32, 96), "InceptionV3": (16, 64), "ConvNeXtTiny": (16, 48), "ResNet50": (32, 96),
    "MobileNetV2": (32, 96), "VGG16": (16, 64), "DenseNet121": (32, 16), "Xception": (16, 48),
}  # fmt: skip
NETWORKS = {f"keras.applications:{name}": batches for name, batches in APPLICATIONS.items()} | {
    "decoder": (32, 8), "vision_transformer": (128, 384), "transformer": (128, 32), "mixer": (128, 512),
    "unet": (64, 256), "wavenet": (64, 256), "conv3d": (128, 32), "bidirectional": (128, 32), "wide_mlp": (1024, 128),
    "text_classifier": (64, 512), "autoencoder": (32, 512), "siamese": (32, 256), "segmentation": (16, 64),
}  # fmt: skip
UNTUNED = ("keras.applications:ResNet50", "keras.applications:VGG16", "decoder", "unet")
ON_CPU = (
    ("mnist_cnn", 128), ("wide_mlp", 128, "float32", "sgd", "train"),
    ("deep_mlp", 1024, "float32", "adamw", "train"), ("unet", 16), ("unet", 16, "mixed_bfloat16"),
    ("transformer", 32, "float32", "adamw", "train"), ("text_classifier", 64, "float32", "rmsprop", "train"),
    ("bidirectional", 64), ("conv3d", 16, "float32", "sgd", "train"), ("keras.applications:MobileNetV2", 16),
    ("keras.applications:MobileNetV2", 32, "float32", "adam", "inference"), ("wavenet", 16),
    ("decoder", 8, "float32", "adamw", "train"), ("vision_transformer", 32, "float32", "lion", "train"),
    ("mixer", 64, "mixed_bfloat16", "sgd", "train"), ("autoencoder", 32, "float32", "adam", "evaluate"),
    ("keras.applications:ResNet50", 8), ("siamese", 32),
    ("keras.applications:VGG16", 4, "float32", "sgd", "inference"),
)  # fmt: skip
CASE_SECONDS, LEAST_SECONDS, STREAM_SECONDS = 200.0, 20.0, 80.0
# By default, JAX takes three quarters of a GPU at once. Cases that run side by side take what they need.
GROWING = {"KERAS_BACKEND": "jax", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
AT_ONCE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
IMAGE = (224, 224, 3)


# Cases, each in a process of its own


def plan(case: Case) -> Case:
    """Have XLA plan a step for a card of the catalogue."""
    from kerasmem.devices.catalogue import find_card
    from kerasmem.estimation.gpu_target import gpu_target_outcome, gpu_target_plan

    card = find_card(case["card"])
    compiled = gpu_target_plan(request_of(case), card, timeout=CASE_SECONDS)
    outcome = gpu_target_outcome(compiled, card)
    ends = {"total": outcome.total, "low": outcome.low, "high": outcome.high}
    return {**ends, "plans": [plan.total for plan in (*compiled.plans, *compiled.unlimited)]}


def card(case: Case) -> Case:
    """Compile a step as Keras's trainer does and run it on zeros."""
    import jax
    import jax.numpy as jnp
    import keras

    from kerasmem.estimation import xla
    from kerasmem.models.step import prepare_step

    request = request_of(case)
    with request.open_model() as opened:
        structure, inputs = request.inputs(opened.model)
        step = prepare_step(
            opened.model, request.training(), structure, inputs, request.samples, request.mode, jit_compile=True
        )
    lowered, _ = xla.lower(step, jax.devices()[0])
    compiled = lowered.compile()
    memory, after_compiling = compiled.memory_analysis(), allocator()
    parts = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    shapes = (tuple(xla.state_of(step).values()), xla.step_batch(step))
    state, data = keras.tree.map_structure(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
    form = jax.tree.structure(state)
    for _ in range(4):
        _, state = compiled(state, data)
        state = jax.block_until_ready(jax.tree.unflatten(form, jax.tree.leaves(state)))
    return {"plan": parts, "after_compiling": after_compiling, "after_steps": allocator(), "driver": driver()}


def product(case: Case) -> Case:
    """Estimate and measure with kerasmem's public functions."""
    import kerasmem

    settings = {"batch_size": case["batch"], "dtype_policy": case["policy"], **case["training"]}
    reports = {
        "estimate": kerasmem.estimate(source_of(case), **settings),
        "measured": kerasmem.measure(source_of(case), steps=5, **settings),
    }
    return {name: {**report.to_dict()["bytes"], "notes": report.notes} for name, report in reports.items()}


def context(case: Case) -> Case:
    """Read the driver and JAX's allocator after CUDA's context and after each library is loaded."""
    import jax
    import jax.numpy as jnp

    readings = {"before": driver()}

    def read(name: str, value: Any) -> None:
        jax.block_until_ready(value)
        readings[name] = {**driver(), "allocator": allocator()}

    read("context", jnp.zeros(1))
    matrix, image = jnp.ones((2048, 2048)), jnp.ones((64, 64, 64, 64))
    read("cuBLAS", jax.jit(jnp.dot)(matrix, matrix))
    read("cuDNN", jax.jit(lambda x, kernel: jax.lax.conv(x, kernel, (1, 1), "SAME"))(image, image[:, :, :3, :3]))
    return readings


def logger(case: Case) -> Case:
    """Train with `MemoryLogger`."""
    from kerasmem import MemoryLogger

    with tempfile.TemporaryDirectory() as folder:
        callback = MemoryLogger(str(Path(folder) / "log.jsonl"), epoch_logs="bytes")
        history = fit_unet(8 * case["batch"], case["batch"], epochs=2, callbacks=[callback]).history
    return {"epochs": history, "notes": callback.notes, "run_peaks": callback.run_peaks, "driver": driver()}


def oom(case: Case) -> Case:
    """Train past the limit of JAX's allocator and have the error explained."""
    import traceback

    import kerasmem

    answer: Case = {}
    try:
        fit_unet(case["batch"], case["batch"])
    except Exception as error:
        answer = {"text": traceback.format_exc()[-6000:], "diagnosis": kerasmem.explain_oom(error).to_dict()}
    return {**answer, "allocator": allocator()}


def fit_unet(rows: int, batch: int, **settings: Any) -> Any:
    import numpy as np
    import zoo

    model = zoo.compiled("unet", "adam", "float32", False, True)
    x, y = np.zeros((rows, 64, 64, 3), "float32"), np.zeros(rows, "int32")
    return model.fit(x, y, batch_size=batch, verbose=0, **settings)


def stream(case: Case) -> Case:
    """Measure images a second of `H5ChunkSequence` alone, of `fit` on one batch that is held, and of both."""
    import h5py
    import keras
    import numpy as np

    from kerasmem import H5ChunkSequence

    keras.config.set_dtype_policy(case["policy"])
    network, batch = keras.Sequential([keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]), case["batch"]
    if case["model"] == "ResNet50":
        network = keras.applications.ResNet50(weights=None, classes=10, classifier_activation=None)
    model = keras.Sequential([keras.Input(IMAGE, dtype="uint8"), keras.layers.Rescaling(1 / 255), network])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    rows = 32 * batch

    def rate(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return round(rows / (time.perf_counter() - begin), 1)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.h5"
        with h5py.File(path, "w") as file:
            images = np.random.default_rng(0).integers(0, 256, (rows, *IMAGE), "u1")
            file.create_dataset("x", data=images, chunks=(16, *IMAGE))
            file["y"] = np.arange(rows) % 10
        with H5ChunkSequence(path, batch_size=batch, memory_budget="512MB", dtype="stored") as sequence:
            held = sequence[0]
            works: dict[str, Callable[[], object]] = {
                "stream": lambda: sum(1 for _ in sequence),
                "step": lambda: model.fit((held for _ in range(len(sequence))), verbose=0),
                "both": lambda: model.fit(sequence, verbose=0),
            }
            rates = {name: [rate(work) for _ in range(3)][1:] for name, work in works.items()}  # the first warms up
    return {"images_per_second": rates, "allocator": allocator()}


KINDS = {kind.__name__: kind for kind in (plan, card, product, context, logger, oom, stream)}


def source_of(case: Case) -> str:
    return case["model"] if ":" in case["model"] else f"{ZOO}:{case['model']}"


def name_of(case: Case) -> str:
    return " ".join(str(case[key]) for key in ("kind", "model", "batch", "policy", "tag") if case.get(key))


def request_of(case: Case) -> Any:
    from kerasmem.models.spec import StepSpec

    return StepSpec(source_of(case), dtype_policy=case["policy"], optimizer="adam", batch_size=case["batch"])


def allocator() -> dict[str, int]:
    """Return JAX's statistics of the first device, empty on a CPU."""
    import jax

    return jax.devices()[0].memory_stats() or {}


def driver() -> dict[str, int | None]:
    """Return the bytes of this process and of all processes, as the driver counts them."""
    from kerasmem.devices.nvml import Nvml

    nvml, _ = Nvml.open()
    if nvml is None or not nvml.devices:
        return {}
    memory, _ = nvml.memory(nvml.devices[0])
    own = dict(nvml.processes(nvml.devices[0])).get(os.getpid())
    return {"process": own, "all": None if memory is None else memory.used_bytes}


# The process that starts them


def in_child(case: Case, seconds: float, cache: str) -> Case:
    environ = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **GROWING}
    if case["kind"] == "card":  # where autotuning took more than the steps, they run again, out of the cache
        environ |= {
            "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        }  # fmt: skip
    ended = run_python(__file__, "--case", json.dumps(case), environ={**environ, **case["environ"]}, timeout=seconds)
    if ended.code != 0:
        raise RuntimeError(ended.error[-1500:])
    return dict(ended.answer)


class Bench:
    """Runs cases until the time is over and writes their results."""

    def __init__(self, output: Path, cache: str, head: Case) -> None:
        self.output, self.cache, self.head = output, cache, head
        self.lock, self.end = threading.Lock(), 0.0
        self.cases: dict[str, Case] = json.loads(output.read_text())["cases"] if output.exists() else {}

    def run(self, case: Case) -> None:
        name = name_of(case)
        if self.cases.get(name, {}).get("status") == "done":
            return
        begin = time.monotonic()
        left = min(self.end - begin, CASE_SECONDS)
        row = {**case, "status": "not reached"}
        if left >= LEAST_SECONDS:
            try:
                row |= {"status": "done"} | in_child(case, left, self.cache)
                before, after = (row.get(f"after_{part}", {}) for part in ("compiling", "steps"))
                if before and before["peak_bytes_in_use"] == after["peak_bytes_in_use"]:
                    row["again"] = in_child(case, max(self.end - time.monotonic(), 1.0), self.cache)
            except Exception as error:
                row |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        with self.lock:
            self.cases[name] = row
            self.output.write_text(json.dumps({"environment": self.head, "cases": self.cases}, indent=1) + "\n")
        print(f"{time.monotonic() - begin:.1f} {name}: {row['status']}", file=sys.stderr, flush=True)

    def run_all(self, cases: list[Case], kinds: str, workers: int = 1) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(workers)
        for case in cases:
            if case["kind"] in kinds.split():
                pool.submit(self.run, case)
        return pool


def make(kind: str, model: str = "", batch: int = 0, policy: str = "float32", *training: str, **more: Any) -> Case:
    settings = dict(zip(("optimizer", "mode"), training or ("adam", "train"), strict=True))
    return {"kind": kind, "model": model, "batch": batch, "policy": policy, "training": settings, "environ": {}, **more}


def all_cases(card_name: str, rehearse: bool) -> list[Case]:
    """Return the cases, the most informative first."""
    networks = {"mnist_cnn": (16, 8)} if rehearse else NETWORKS
    few = list(networks) if rehearse else UNTUNED
    order = itertools.product((0, 1), ("float32", "mixed_bfloat16"), networks)
    steps = [(name, networks[name][column], policy) for column, policy, name in order]
    past = {**AT_ONCE, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.03"}
    untuned = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    return [
        *(make("plan", *step, card=card_name) for step in steps),
        make("context", policy=""),
        make("context", policy="", environ=AT_ONCE, tag="at once"),
        make("logger", "unet", 8 if rehearse else 256),
        make("oom", "unet", 8 if rehearse else 8192, environ=past),
        *(make("card", *step) for step in steps),
        *(make("product", name, networks[name][0]) for name in few),
        *(make("card", name, networks[name][0], environ=untuned, tag="untuned") for name in few),
        make("stream", *(("small", 8) if rehearse else ("ResNet50", 128)), "mixed_bfloat16"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=Path("gpu.json"), help="results file. Defaults to gpu.json")
    add("--seconds", type=float, default=330.0, help="time limit of all cases together. Defaults to 330")
    add("--only", default="", help="run cases whose name contains TEXT", metavar="TEXT")
    add("--rehearse", action="store_true", help="run a few small cases")
    add("--cpu", action="store_true", help="compare estimates with steps on the CPU instead")
    add("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    from kerasmem.devices.machine import list_devices
    from kerasmem.errors import MissingExtraError

    if options.case:
        try:
            answer = KINDS[options.case["kind"]](options.case)
        except MissingExtraError as error:
            answer = {"status": "skipped", "error": str(error)}
        print(json.dumps({**answer, "has_tensorflow": "tensorflow" in sys.modules}))
        return

    begin, devices = time.monotonic(), list_devices()
    name = devices[0].name if devices else "h100-sxm"
    cases = all_cases(name, options.rehearse)
    if options.cpu:
        cases = [make("product", *step, environ={"JAX_PLATFORMS": "cpu"}) for step in ON_CPU]
    cases = [case for case in cases if options.only in name_of(case)]
    workers = max(1, (os.cpu_count() or 1) * 3 // 8)
    head = {
        **environment("keras", "jax", "jaxlib", "h5py", "numpy"),
        "devices": [device.to_dict() for device in devices],
    }
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(options.output, cache, head)
        bench.end = begin + options.seconds - min(STREAM_SECONDS, options.seconds / 4)
        planning = bench.run_all(cases, "plan", workers)
        bench.run_all(cases, "context logger").shutdown()
        bench.run_all(cases, "card product oom", workers).shutdown()
        planning.shutdown()
        bench.end = begin + options.seconds
        bench.run_all(cases, "stream").shutdown()
    sys.exit(any(case["status"] == "failed" for case in bench.cases.values()))


if __name__ == "__main__":
    main()
