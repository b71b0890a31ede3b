#!/usr/bin/env python3
"""What one of several devices needs: `kerasmem.estimate(replicas=…)` against processes that really train together.

    python scripts/bench/parallel.py [--quick]

TensorFlow: 2 and 4 processes on loopback under `MultiWorkerMirroredStrategy` in graph mode, with the BFC allocator on
the CPU (TF_CPU_ALLOCATOR_USE_BFC): the median over ten steps of the allocator's peak, and of that over the processes.

JAX: 2 and 4 processes on loopback under `keras.distribution` (gloo collectives), one CPU device each; weights in
shards (`ModelParallel`), the optimizer's slots in shards, or the batch only (`DataParallel`). The most that a process
had resident during two steps, less what it had after its state and batch were deleted. glibc is told to give
freed memory back at once (MALLOC_MMAP_THRESHOLD_); the allocator rounds nothing here, so the estimate's total is
compared as it is.

Keras 3.15's `fit` does not run under `MultiWorkerMirroredStrategy` as it is: two of its helpers are replaced in the
workers, see `train_tensorflow`. Nothing was changed in kerasmem after the models marked "held out" were first measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 12
# On a CPU XLA starts collectives in no fixed order, each in a thread that waits: with a thread a core, processes can
# wait for one another for ever.
THREADS, ATTEMPTS = 16, 2
KINDS = {"data": ("data", False), "optimizer": ("data", True), "model": ("model", False)}
# (file:function, batch of all processes together, held out)
TENSORFLOW = (
    ("parallel_models.py:dense", 64, False), ("zoo.py:mnist_cnn", 128, False), ("zoo.py:transformer", 64, False),
    ("zoo.py:unet", 32, False), ("zoo.py:text_classifier", 128, False), ("zoo.py:deep_mlp", 64, False),
    ("zoo.py:mixer", 64, True), ("zoo.py:separable", 64, True),
)  # fmt: skip
JAX = (
    ("parallel_models.py:dense", 64, False), ("parallel_models.py:transformer", 64, False),
    ("parallel_models.py:words", 64, True),
)  # fmt: skip


def build(name: str) -> Any:
    """Return the model of a "file.py:function"."""
    file, _, function = name.partition(":")
    sys.path.insert(0, str(HERE))
    return getattr(__import__(file.removesuffix(".py")), function)()


def batch_of(model: Any, samples: int) -> tuple[Any, Any]:
    """Return random inputs and targets of the model's shapes."""
    import numpy as np

    draw = np.random.default_rng(0)

    def tensor(spec: Any) -> Any:
        shape = (samples, *spec.shape[1:])
        return draw.integers(0, 50, shape, "int32") if "int" in spec.dtype else draw.random(shape, "float32")

    inputs = [tensor(each) for each in model.inputs]
    return (inputs[0] if len(inputs) == 1 else inputs), tensor(model.outputs[0])


def train_tensorflow(task: dict[str, Any]) -> dict[str, Any]:
    """Train as one of the workers, and return the allocator's peaks."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy() if task["n"] > 1 else tf.distribute.get_strategy()
    import keras
    from keras.src.backend.tensorflow import trainer

    device, peaks = "CPU:0", []
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = build(task["model"])
        model.compile("adam", "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    x, y = batch_of(model, task["batch"] // task["n"])

    def repeated(_context: Any = None) -> Any:
        return tf.data.Dataset.from_tensors((x, y)).repeat()

    class Peaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            tf.config.experimental.reset_memory_stats(device)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            peaks.append(int(tf.config.experimental.get_memory_info(device)["peak"]))

    # `_maybe_symbolic_build` reduces a tuple, which strategies refuse; all is built above. What `fit` logs is then
    # reduced along an axis that scalars do not have.
    model._maybe_symbolic_build = lambda **_: None
    trainer._collective_all_reduce_multi_worker = lambda _: False
    data = strategy.distribute_datasets_from_function(repeated) if task["n"] > 1 else repeated()
    model.fit(data, steps_per_epoch=STEPS, epochs=1, verbose=0, callbacks=[Peaks()])
    settled = peaks[2:]
    return {"measured": int(statistics.median(settled)), "low": min(settled), "high": max(settled)}


def status(field: str) -> int:
    """Return a figure of this process's from the kernel, in bytes."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def train_jax(task: dict[str, Any]) -> dict[str, Any]:
    """Train as one of the processes, and return what was resident at most beyond what is left without the state."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    import keras

    distribution, n = keras.distribution, task["n"]
    distribution.initialize(f"127.0.0.1:{task['ports'][0]}", n, task["index"])
    devices = distribution.list_devices()
    from kerasmem.estimation.parallel.parallelism import by_rule, first_divisible

    keras.utils.set_random_seed(0)
    if task["kind"] == "model":
        mesh = distribution.DeviceMesh((1, n), ("batch", "model"), devices)
        layout = distribution.LayoutMap(mesh)
        for variable in build(task["model"]).trainable_variables:  # a first model, for its paths
            layout[variable.path] = by_rule(tuple(variable.shape), n)
        keras.backend.clear_session()
        gc.collect()
        distribution.set_distribution(distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    else:
        mesh = distribution.DeviceMesh((n,), ("batch",), devices)
        distribution.set_distribution(distribution.DataParallel(device_mesh=mesh))
    model = build(task["model"])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    if task["kind"] == "optimizer":
        for slot in model.optimizer.variables:
            place = distribution.TensorLayout(first_divisible(tuple(slot.shape), n), mesh).backend_layout
            slot._layout = place
            slot._value = jax.jit(lambda value: value, out_shardings=place)(slot._value)
    x, y = batch_of(model, task["batch"] if task["kind"] == "model" else task["batch"] // n)
    for _ in range(2):
        model.train_on_batch(x, y)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    for _ in range(2):
        model.train_on_batch(x, y)
    most = status("VmHWM")
    variables = {id(each): each for each in (*model.variables, *model.optimizer.variables)}.values()
    state = sum(shard.data.nbytes for each in variables for shard in each.value.addressable_shards)
    for each in variables:
        each.value.delete()
    batch = sum(each.nbytes for each in ((*x, y) if isinstance(x, list) else (x, y)))
    del x, y, each
    gc.collect()
    return {"measured": most - status("VmRSS"), "state": state, "batch": batch, "resident": most}


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def together(task: dict[str, Any], timeout: float = 150) -> list[dict[str, Any]]:
    """Run the task in as many processes as it says, and return what they measured.

    Raises:
        RuntimeError: one of them failed.
        TimeoutError: all together took too long.
    """
    n, ports = task["n"], free_ports(task["n"])
    processes = []
    for index in range(n):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "XLA_FLAGS": ""}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
        if task["engine"] == "jax":
            environment |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536"}
            environment["NPROC"] = str(THREADS)  # as many in XLA's pool
        else:
            environment["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
            if n > 1:
                cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
                environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        text = json.dumps({**task, "index": index, "ports": ports})
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, "--worker", text],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
        )
    answers = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            if process.returncode or not lines:
                raise RuntimeError(f"{task}: exit code {process.returncode}: {err.strip()[-600:]}")
            answers.append(json.loads(lines[-1]))
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{task}: took longer than {timeout:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return answers


def estimated(task: dict[str, Any]) -> dict[str, Any]:
    """Return what kerasmem says of one of the processes."""
    import kerasmem

    parallel, shards = KINDS[task["kind"]]
    report = kerasmem.estimate(
        f"{HERE}/{task['model']}", batch_size=task["batch"], optimizer="adam", loss="mse", replicas=task["n"],
        parallel=parallel, shard_optimizer=shards, method="xla" if task["engine"] == "jax" else "graph",
    )  # fmt: skip
    return {"estimated": report.bytes.total, "claimed": [report.bytes.low, report.bytes.high]}


def measure(task: dict[str, Any], held_out: bool) -> dict[str, Any]:
    """Return one row: estimate, measurement and their ratio."""
    answers, attempts = None, 0
    while answers is None:
        attempts += 1
        try:
            answers = together(task)
        except TimeoutError:
            if attempts == ATTEMPTS:
                raise
    measured = statistics.median(each["measured"] for each in answers)
    row = {**task, "held_out": held_out, **estimated(task), "measured": int(measured)}
    row |= {"attempts": attempts, "processes": answers}
    row["ratio"] = round(row["estimated"] / measured, 4)
    print(f"{task['engine']:10} {task['model']:32} {task['kind']:9} {task['n']} {row['estimated']:13,} "
          f"{row['measured']:13,} {row['ratio']:.3f}", file=sys.stderr, flush=True)  # fmt: skip
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the worst error of some rows, in per cent, and how many lie in the claimed interval."""
    errors = [abs(row["ratio"] - 1) * 100 for row in rows]
    inside = sum(row["claimed"][0] <= row["measured"] <= row["claimed"][1] for row in rows)
    return {"rows": len(rows), "median_percent": round(statistics.median(errors), 2),
            "worst_percent": round(max(errors), 2), "in_interval": inside}  # fmt: skip


def tasks(quick: bool) -> list[tuple[dict[str, Any], bool]]:
    """Return what to measure, and whether it is held out."""
    replicas = (2,) if quick else (2, 4)
    found = []
    for model, batch, held_out in TENSORFLOW[1:2] if quick else TENSORFLOW:
        for n in replicas:
            found.append(({"engine": "tensorflow", "model": model, "kind": "data", "n": n, "batch": batch}, held_out))
    for model, batch, held_out in JAX[:1] if quick else JAX:
        for kind in ("model",) if quick else KINDS:
            for n in replicas:
                found.append(({"engine": "jax", "model": model, "kind": kind, "n": n, "batch": batch}, held_out))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a row of each engine with two processes; writes nothing")
    parser.add_argument("--engine", choices=["tensorflow", "jax"], help="only these; writes nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        print(json.dumps({"tensorflow": train_tensorflow, "jax": train_jax}[task["engine"]](task)), flush=True)
        os._exit(0)  # neither engine's shutdown waits for the others
    sys.path.insert(0, str(HERE.parent.parent))
    from environment import environment, write_results

    chosen = [each for each in tasks(arguments.quick) if arguments.engine in (None, each[0]["engine"])]
    rows, failed = [], []
    for task, held_out in chosen:
        try:
            rows.append(measure(task, held_out))
        except (RuntimeError, TimeoutError) as error:
            print(error, file=sys.stderr, flush=True)
            failed.append({**task, "reason": str(error)[-300:]})
    of = {engine: [row for row in rows if row["engine"] == engine] for engine in ("tensorflow", "jax")}
    data = {
        "environment": environment("tensorflow", "keras", "jax", "jaxlib"),
        "summary": {
            **{engine: summary(some) for engine, some in of.items() if some},
            **({"held out": summary(some)} if (some := [row for row in rows if row["held_out"]]) else {}),
            "all": summary(rows),
        },
        "rows": rows,
        "failed": failed,
    }
    print(json.dumps(data["summary"], indent=1))
    if not (arguments.quick or arguments.engine):
        write_results("parallel", data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
