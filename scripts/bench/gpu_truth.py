#!/usr/bin/env python3
"""XLA's plan of a training step against the memory that a real GPU gives it: for a machine that has one.

    python scripts/bench/gpu_truth.py [MODEL …] [--batches 32,128] [--dtypes float32,mixed_bfloat16] [--steps 5]
    python scripts/bench/gpu_truth.py --self-check        # the whole path on the CPU with one tiny model
    python scripts/bench/gpu_truth.py --all [--only 3,1] [--minutes 25] [--out FOLDER]
    python scripts/bench/gpu_truth.py --all --rehearse    # every kind of part on the CPU, as far as it goes there

`--all` runs seven kinds of parts and writes a JSON file for each as it goes (`gpu_truth_parts.py`). A part that is
there already is left alone, so a run that was cut goes on where it stopped. Without `--all`:

Runs from a plain checkout with what is there: Keras on JAX, Keras on TensorFlow (`--framework`), or JAX alone, which
then trains models of its own (their names begin with "plain_"). Every row is a fresh process that takes memory as it
needs it (no preallocation). A row has:

- `plan`: `memory_analysis()` of the step compiled on the device itself (JAX only);
- `deviceless`: the variants of `kerasmem.estimation.gpu_target` for the same card, where the extra is installed;
- `measured`: the allocator's peak in bytes after compiling and after the steps, and what NVML shows of the process.

The peak after compiling holds the autotuning of the first compilation, which no plan contains: where it is above the
steps' own, JAX cannot show theirs (its peak is never reset) and `peak_is_of_steps` is false.
Without a GPU the script says so and ends with exit code 2.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import RESULTS, ROOT, environment, write_results
from gpu_truth_machine import card_key, driver_bytes, environ_of, gpu_name, has, nvidia_smi
from gpu_truth_models import (
    KERAS_MODELS,
    LEARNING_RATE,
    PLAIN_MODELS,
    TINY,
    compiled_keras_model,
    plain_model,
    target_shape,
)
from gpu_truth_parts import KINDS, run_all

# One row, in its own process


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train one model for some steps in this process and return its row."""
    before = driver_bytes()
    row = measure_tensorflow(task) if task["framework"] == "tensorflow" else measure_jax(task)
    row["measured"]["driver_before"] = before
    row["measured"]["driver_after"] = driver_bytes()
    return {**task, **row}


def measure_jax(task: dict[str, Any]) -> dict[str, Any]:
    """Compile the step on JAX's device, run it, and read the allocator."""
    import jax

    device = jax.devices()[0]
    jax.block_until_ready(jax.device_put(1.0, device))
    context = driver_bytes()
    step, state, data = plain_step(task) if task["model"] in PLAIN_MODELS or not has("keras") else keras_step(task)
    state, data = jax.device_put((state, data), device)
    compiled = jax.jit(step, donate_argnums=0).lower(state, data).compile()
    memory = compiled.memory_analysis()
    after_compiling = peak_of(device)
    for _ in range(task["steps"]):
        logs, state = compiled(state, data)
        jax.block_until_ready((logs, state))
    peak = peak_of(device)
    stats = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "plan": {
            "argument": memory.argument_size_in_bytes,
            "output": memory.output_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
        },
        "measured": {
            "peak_after_compiling": after_compiling,
            "peak": peak,
            "peak_is_of_steps": None if peak is None else peak > (after_compiling or 0),
            "in_use": stats.get("bytes_in_use"),
            "reserved": stats.get("pool_bytes", stats.get("bytes_reserved")),
            "limit": stats.get("bytes_limit"),
            "driver_with_context": context,
        },
    }


def peak_of(device: Any) -> int | None:
    """Return the allocator's peak in use; None where it keeps no account, as on the CPU."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def keras_step(task: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return Keras's training step on JAX, its state and a batch."""
    import jax.numpy as jnp

    model = compiled_keras_model(task)
    x = jnp.zeros((task["batch"], *model.inputs[0].shape[1:]), model.inputs[0].dtype)
    y = jnp.zeros(target_shape(model, task["batch"]), "int32")
    model._symbolic_build(data_batch=(x, y))
    groups = (
        model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables,
    )  # fmt: skip
    state = tuple([variable.value for variable in group] for group in groups)
    return model.train_step, state, (x, y)


def plain_step(task: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return a training step with Adam in JAX alone, its state and a batch."""
    import jax
    import jax.numpy as jnp

    weights, x, loss = plain_model(task["model"], task["batch"], task["dtype"])
    zeros = jax.tree.map(jnp.zeros_like, weights)

    def step(state: Any, x: Any) -> Any:
        weights, first, second = state
        value, gradients = jax.value_and_grad(loss)(weights, x)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
        weights = jax.tree.map(lambda w, m, v: w - LEARNING_RATE * m / (jnp.sqrt(v) + 1e-7), weights, first, second)
        return value, (weights, first, second)

    return step, (weights, zeros, jax.tree.map(jnp.copy, zeros)), x


def measure_tensorflow(task: dict[str, Any]) -> dict[str, Any]:
    """Train with Keras on TensorFlow, its batch on the device, and read the allocator after each step."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    device = "GPU:0" if gpus else "CPU:0"
    with tf.device(device):
        tf.zeros((1,)).numpy()
    context = driver_bytes()
    model = compiled_keras_model(task)
    x = tf.zeros((task["batch"], *model.inputs[0].shape[1:]), model.inputs[0].dtype)
    y = tf.zeros(target_shape(model, task["batch"]), "int32")
    model.train_on_batch(x, y)
    after_compiling = tensorflow_peak(device)
    peaks = []
    for _ in range(task["steps"]):
        if after_compiling is not None:
            tf.config.experimental.reset_memory_stats(device)
        model.train_on_batch(x, y)
        peaks.append(tensorflow_peak(device))
    known = [peak for peak in peaks if peak is not None]
    return {
        "device": tf.config.experimental.get_device_details(gpus[0]).get("device_name") if gpus else "cpu",
        "plan": tensorflow_plan(model, x, y, device) if task["jit_compile"] and task.get("plan") else None,
        "measured": {
            "peak_after_compiling": after_compiling,
            "peak": max(known, default=None),
            "peaks": peaks,
            "peak_is_of_steps": after_compiling is not None,
            "in_use": tensorflow_peak(device, "current"),
            "driver_with_context": context,
        },
    }


def tensorflow_peak(device: str, which: str = "peak") -> int | None:
    """Return the allocator's peak in use; None where it keeps no account."""
    import tensorflow as tf

    try:
        return int(tf.config.experimental.get_memory_info(device)[which])
    except ValueError:
        return None


def tensorflow_plan(model: Any, x: Any, y: Any, device: str) -> dict[str, Any]:
    """Return XLA's plan of the step on the device itself, compiled once more, or why there is none."""
    import tensorflow as tf
    from tensorflow.compiler.xla.service import hlo_pb2

    sys.path.insert(0, str(ROOT))
    from kerasmem.estimation.xla import read_plan

    where = f"/job:localhost/replica:0/task:0/device:{device}"
    try:
        compiled = tf.function(model.train_step, jit_compile=True).experimental_get_compiler_ir((x, y))
        module = hlo_pb2.HloProto.FromString(compiled(stage="optimized_hlo_proto_serialized", device_name=where))
        plan = read_plan(module)
    except Exception as error:
        return {"why_not": f"{type(error).__name__}: {error}"[:300]}
    return {"temp": plan.temporary, "output": sum(plan.outputs), "requested": plan.requested}


def deviceless(task: dict[str, Any]) -> dict[str, Any] | None:
    """Return the plan that kerasmem makes without the device, or why there is none; None where nothing was asked."""
    if task["model"] in PLAIN_MODELS or task["card"] is None or not has("keras"):
        return None
    sys.path.insert(0, str(ROOT))
    from kerasmem.devices.catalogue import find_card
    from kerasmem.errors import KerasmemError
    from kerasmem.estimation.gpu_target.plan import gpu_target_plan
    from kerasmem.models.request import ModelRequest

    source, arguments = "gpu_truth_models:compiled_keras_model", {"task": task}
    request = ModelRequest(source=source, factory_args=arguments, batch_size=task["batch"])
    try:
        plan = gpu_target_plan(request, find_card(task["card"]))
    except KerasmemError as error:
        return {"why_not": str(error)}
    variants = [
        {"limited": each.limited, "triton": each.triton, "total": each.total, "temp": each.temp}
        for each in plan.variants
    ]
    return {"card": plan.card, "variants": variants, "convolutions": len(plan.convolutions), "seconds": plan.seconds}


# All rows


def in_a_fresh_process(task: dict[str, Any], what: str, device: str) -> dict[str, Any]:
    """Run `measure` or `deviceless` for one row; a failure is a row of its own."""
    environ = environ_of(task["framework"], device)
    if what == "deviceless":
        del environ["KERAS_BACKEND"]
    done = subprocess.run(
        [sys.executable, __file__, "--one", what, json.dumps(task)], capture_output=True, text=True, env=environ
    )
    if done.returncode:
        return {**task, "failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:500]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows_of(tasks: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Measure every task, plan it without the device, and say how they compare."""
    rows = []
    for task in tasks:
        row = in_a_fresh_process(task, "measure", device)
        without = in_a_fresh_process(task, "deviceless", device)
        row["deviceless"] = {"why_not": without["failed"]} if "failed" in without else without["deviceless"]
        rows.append(row)
        print(summary_of(row), file=sys.stderr)
    return rows


def summary_of(row: dict[str, Any]) -> str:
    """Return a row in a line."""

    def mib(count: int | None) -> str:
        return "       ?" if count is None else f"{count / 2**20:8.1f}"

    name = f"{row['model']:18} {row['batch']:4} {row['dtype']:15} {row['framework']}"
    if "failed" in row:
        return f"{name}: failed: {row['failed']}"
    plan, without = row["plan"], (row["deviceless"] or {}).get("variants")
    total = None if plan is None else plan["argument"] + plan["output"] - plan["alias"] + plan["temp"]
    return (
        f"{name}: plan {mib(total)}  deviceless {mib(without[0]['total'] if without else None)}  "
        f"measured {mib(row['measured']['peak'])} MiB"
    )


def all_parts(options: argparse.Namespace, name: str | None) -> int:
    """Run `--all` and return its exit code."""
    unknown = [kind for kind in options.only.split(",") if kind not in map(str, KINDS)]
    if unknown:
        print(f"--only {options.only}: kinds are {', '.join(map(str, KINDS))}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended too
    wanted = None if options.rehearse else options.card or name
    card = card_key(wanted) if wanted else None
    folder = options.out or RESULTS / f"gpu_truth-{'rehearsal' if options.rehearse else card or 'gpu'}"
    return run_all(
        folder,
        models=options.models,
        kinds=[int(kind) for kind in options.only.split(",")],
        card=card,
        gpu=None if options.rehearse else name,
        minutes=options.minutes,
        steps=options.steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--batches", default="16,64")
    parser.add_argument("--dtypes", default="float32,mixed_bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--framework", choices=("auto", "jax", "tensorflow"), default="auto")
    parser.add_argument("--card", help="the catalogue's name for the card, where the driver's is not in it")
    parser.add_argument("--self-check", action="store_true", help="one tiny model on the CPU; writes no results")
    parser.add_argument("--all", action="store_true", help="all kinds of parts, a JSON file each")
    parser.add_argument("--rehearse", action="store_true", help="with --all: small, on the CPU")
    parser.add_argument("--only", default=",".join(map(str, KINDS)), help="with --all: kinds, in this order")
    parser.add_argument("--minutes", type=float, help="with --all: begin no part after so many minutes")
    parser.add_argument("--out", type=Path, help="with --all: the folder for the files")
    parser.add_argument("--one", choices=("measure", "deviceless"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task = json.loads(options.models[0])
        print(json.dumps(measure(task) if options.one == "measure" else {"deviceless": deviceless(task)}))
        return
    name = gpu_name()
    if name is None and not (options.self_check or options.rehearse):
        print(
            "no NVIDIA GPU on this machine (nvidia-smi and NVML show none); --self-check runs without", file=sys.stderr
        )
        sys.exit(2)
    if options.all or options.rehearse:
        sys.exit(all_parts(options, name))
    framework = options.framework
    if framework == "auto":
        framework = "jax" if has("jax") else "tensorflow"
    if not has(framework):
        print(f"{framework} is not installed", file=sys.stderr)
        sys.exit(2)
    defaults = [TINY] if options.self_check else [*(KERAS_MODELS if has("keras") else ()), *PLAIN_MODELS]
    usable = [model for model in defaults if framework == "jax" or model not in PLAIN_MODELS]
    settings = {"framework": framework, "steps": options.steps, "jit_compile": True}
    wanted = options.card or (None if options.self_check else name)
    card = card_key(wanted) if wanted is not None else None
    tasks = [
        {"model": model, "batch": int(batch), "dtype": dtype, "card": card, **settings}
        for model in options.models or usable
        for batch in (["4"] if options.self_check else options.batches.split(","))
        for dtype in (["float32"] if options.self_check else options.dtypes.split(","))
    ]
    rows = rows_of(tasks, "cpu" if options.self_check else "gpu")
    packages = [each for each in ("tensorflow", "keras", "jax", "jaxlib", "numpy") if has(each)]
    driver = (nvidia_smi("driver_version") or [None])[0]
    data = {
        "environment": {**environment(*packages), "gpu": name, "driver": driver},
        "settings": {**settings, "card": card, "preallocation": False, "optimizer": "adam"},
        "rows": rows,
    }
    if options.self_check:
        print(json.dumps(data, indent=1))
        sys.exit(1 if any("failed" in row for row in rows) else 0)
    write_results(f"gpu_truth-{card or (name or 'gpu').lower().replace(' ', '-')}", data)


if __name__ == "__main__":
    main()
