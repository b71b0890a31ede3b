"""One part of `gpu_truth.py --all`, in this process; the answer is the last line, as JSON.

python scripts/bench/gpu_truth_child.py KIND '{"model": …}'

What needs a card and was left out stands in the answer's `needs_card`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environment import ROOT
from gpu_truth_machine import environ_of, gpu_bytes

sys.path.insert(0, str(ROOT))
MIB = 1 << 20
Task = dict[str, Any]


def ask(kind: str, task: Task, framework: str, device: str, **more: str) -> dict[str, Any]:
    """Run a kind of part in a fresh process of this one's session; return its answer, or how it ended.

    Returns:
        The answer; or `failed`, the last line of what it said, and `out_of_memory`, whether that is what it says.
    """
    done = subprocess.run(
        [sys.executable, __file__, kind, json.dumps(task)],
        capture_output=True,
        text=True,
        env=environ_of(framework, device, **more),
    )
    if not done.returncode:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    from kerasmem import explain_oom

    said = explain_oom(done.stderr)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"failed": last[:500], "out_of_memory": said.out_of_memory, "exit_code": done.returncode}


def device_here() -> str:
    """Return "cpu" where this process was told to rehearse, "gpu" otherwise."""
    return "cpu" if os.environ.get("CUDA_VISIBLE_DEVICES") == "-1" else "gpu"


def step(task: Task) -> dict[str, Any]:
    """Kind 1: a training step, measured."""
    from gpu_truth import measure

    row = measure(task)
    missing = [] if row["measured"]["driver_after"] is not None else ["what the driver counts"]
    if row["measured"]["peak"] is None:
        missing.append("the allocator's peak")
    return {**row, "needs_card": missing}


def predicted(task: Task) -> dict[str, Any]:
    """Return kerasmem's estimate of a step, for the card or for this machine; runs without the card."""
    import kerasmem

    report = kerasmem.estimate(
        "gpu_truth_models:compiled_keras_model",
        factory_args={"task": task},
        batch_size=task["batch"],
        device=task["device"],
        jit_compile=task["jit_compile"],
    )
    need = report.bytes
    method = report.settings.method
    return {"total": need.total, "low": need.low, "high": need.high, "method": method, "notes": list(report.notes)[:4]}


def train(task: Task) -> dict[str, Any]:
    """Train some steps under a limit, where one is given; return how long a step takes."""
    from gpu_truth_models import compiled_keras_model, target_shape

    if task["framework"] == "jax":
        import jax
        import jax.numpy as numpy

        pool = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    else:
        import tensorflow as tf
        from tensorflow.experimental import numpy

        pool = None
        for gpu in tf.config.list_physical_devices("GPU")[:1]:
            if task.get("limit") is None:
                tf.config.experimental.set_memory_growth(gpu, True)
            else:
                pool = math.ceil(task["limit"] / MIB) * MIB
                limited = tf.config.LogicalDeviceConfiguration(memory_limit=pool // MIB)
                tf.config.set_logical_device_configuration(gpu, [limited])
    model = compiled_keras_model(task)
    x = numpy.zeros((task["batch"], *model.inputs[0].shape[1:]), model.inputs[0].dtype)
    y = numpy.zeros(target_shape(model, task["batch"]), "int32")
    model.train_on_batch(x, y)
    seconds = []
    for _ in range(task["steps"]):
        began = time.perf_counter()
        loss = float(model.train_on_batch(x, y))
        seconds.append(round(time.perf_counter() - began, 5))
    return {"step_seconds": seconds, "loss_is_finite": math.isfinite(loss), "pool": pool}


def limited_to(size: int, framework: str, device: str) -> tuple[dict[str, str], int | None]:
    """Return the variables that give a process's allocator so many bytes, and the limit it has to set itself."""
    if device == "cpu":
        return {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(math.ceil(size / MIB))}, None
    if framework == "tensorflow":
        return {}, size
    memory = gpu_bytes()
    if memory is None:
        raise RuntimeError("the driver does not tell the card's memory, of which JAX's limit is a fraction")
    fraction = f"{size / memory['total']:.6f}"
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction}, None


def capped(task: Task) -> dict[str, Any]:
    """Kind 2: a prediction, then the step under a limit of its `high`, and of 0.9 of what it says is needed."""
    device = device_here()
    target = None
    if device == "gpu":
        target = task["card"] or str((gpu_bytes() or {}).get("total", "")) or None
    # the prediction is made on the CPU: the card is to be all the step's
    found = ask("predicted", {**task, "device": target}, task["framework"], "cpu")
    if "failed" in found:
        raise RuntimeError(f"no prediction: {found['failed']}")
    result: dict[str, Any] = {"estimate": found, "needs_card": []}
    if device == "cpu" and task["framework"] == "jax":
        return {**result, "needs_card": ["a limit: JAX has none on a CPU"]}
    for name, size in (("at_high", found["high"]), ("at_0.9", int(0.9 * found["total"]))):
        variables, limit = limited_to(size, task["framework"], device)
        again = ask("train", {**task, "limit": limit}, task["framework"], device, **variables)
        result[f"{name}_bytes"] = size
        result[name] = "trained" if "failed" not in again else "ran out" if again["out_of_memory"] else again["failed"]
        result[f"{name}_pool"] = again.get("pool")
    return result


def nvml(task: Task) -> dict[str, Any]:
    """Kind 5: what NVML answers before, while and after a process trains, as `tests/data/nvml` has it."""
    import pynvml
    from gpu_truth_nvml import Recorder

    with Recorder(pynvml) as recorder:
        recorder.read()
        small = {"model": "mnist_cnn", "batch": 64, "dtype": "float32", "jit_compile": True, "steps": 2}
        framework = os.environ["KERAS_BACKEND"]
        train({**small, "framework": framework})
        recorder.read()
        train({**small, "framework": framework, "batch": 64 if task["rehearsed"] else 4096})
        recorder.read()
        recording = recorder.recording(f"read while Keras on {framework} trains")
    return {"recording": recording, "needs_card": [] if recording["init"] is None else ["a driver to record"]}


def logger(task: Task) -> dict[str, Any]:
    """Kind 6: fits with MemoryLogger and without, by turns, on whatever device TensorFlow has."""
    from logger import BATCH, hooks, pairs

    count, steps, batches = (1, 10, 50) if task["rehearsed"] else (20, 300, 5000)
    with tempfile.TemporaryDirectory() as folder:
        rows = pairs(count, steps, Path(folder, "run.jsonl"))
        alone = {"memory alone": hooks({}, batches), "jsonl": hooks({"filename": Path(folder, "hooks.jsonl")}, batches)}
    settings = {"pairs": count, "steps": steps, "batch_size": BATCH, "hook_batches": batches}
    missing = [] if device_here() == "gpu" else ["the cost beside a card: these rows are a CPU's"]
    return {"settings": settings, "hooks": alone, "rows": rows, "needs_card": missing}


def _offload_or_unified(task: Task) -> dict[str, Any]:
    import gpu_truth_beyond as beyond

    return beyond.offload(task) if task["what"] == "offload" else beyond.unified(task, ask, device_here())


def _libraries(task: Task) -> dict[str, Any]:
    import gpu_truth_libraries as libraries

    kinds = {"handles": libraries.handles, "workspace": libraries.workspace, "autotuning": libraries.autotuning}
    return kinds[task["what"]](task)


def _streaming(task: Task) -> dict[str, Any]:
    from gpu_truth_streaming import streaming

    return {**streaming(task), "needs_card": [] if device_here() == "gpu" else ["a card to stream into"]}


PARTS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "1": step,
    "2": capped,
    "3": _libraries,
    "4": _offload_or_unified,
    "5": nvml,
    "6": logger,
    "7": _streaming,
    "predicted": predicted,
    "train": train,
}

if __name__ == "__main__":
    print("\n" + json.dumps(PARTS[sys.argv[1]](json.loads(sys.argv[2]))))
