#!/usr/bin/env python3
"""How fast this machine's operations are: the rates that `kerasmem.estimation.graph.costs` orders threads by.

    python scripts/bench/op_costs.py [MODEL …] [--kernels onednn,eigen]

Each model trains a few steps in a fresh process under TensorFlow's profiler, on each kind of kernels. For each kind of
operation: bytes moved and arithmetic per second of its median time, beside what the rates say of the same operations,
and how much the time of one operation varies from step to step (standard deviation of its logarithm; of operations
that take longer than 0.3 ms). Two operations run side by side most of the time and share the cores, so that all take
longer than the rates say: what counts is that all take as many times as long.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from environment import ROOT, environment, write_results

MODELS = ("vgg16", "transformer", "mobilenet_v2", "wide_mlp")
STEPS = 4


def measure(name: str) -> dict[str, Any]:
    """Return the times of the operations of one model's step, and what each moves and computes."""
    import tensorflow as tf
    import zoo

    from kerasmem.estimation.truth.networks import loss

    build, batch = zoo.MODELS[name]
    model = build()
    model.compile(optimizer="adam", loss=loss("sparse"), jit_compile=False)
    x = [tf.zeros((batch, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
    data = (x if len(x) > 1 else x[0], tf.zeros((batch,), tf.int32))
    for _ in range(3):
        model.train_on_batch(*data)
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        tf.profiler.experimental.start(folder, options=options)
        for _ in range(STEPS):
            model.train_on_batch(*data)
        tf.profiler.experimental.stop()
        took = _durations(folder)
    return {"took": took, "work": _work(build, batch)}


def _durations(folder: str) -> dict[str, list[float]]:
    """Return operation → seconds of each execution."""
    from pathlib import Path

    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    found: dict[str, list[float]] = collections.defaultdict(list)
    for path in Path(folder).rglob("*.xplane.pb"):
        for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
            names = {key: value.name for key, value in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    name, colon, _ = names[event.metadata_id].partition("#")[0].rpartition(":")
                    if colon:
                        found[_plain(name)].append(event.duration_ps / 1e12)
    return found


def _work(build: Any, batch: int) -> dict[str, Any]:
    """Return operation → (kind, bytes moved, floating-point operations, seconds by the rates), by the same program."""
    from kerasmem.devices.kernels import cpu_kernels
    from kerasmem.estimation.graph.build import build_program
    from kerasmem.estimation.graph.costs import operations, seconds
    from kerasmem.estimation.graph.rules import rules_of
    from kerasmem.models.inputs import model_inputs
    from kerasmem.models.opening import open_model
    from kerasmem.models.step import prepare_step, trace_step
    from kerasmem.models.training import TrainingSettings

    rules = rules_of(cpu_kernels())
    with open_model(build) as opened:
        structure, inputs = model_inputs(opened.model, {})
        training = TrainingSettings("adam", loss_config="sparse_categorical_crossentropy")
        program, _ = build_program(trace_step(prepare_step(opened.model, training, structure, inputs, batch)), rules)
    found = {}
    for node in program.nodes:
        taken = [program.nodes[source].outputs[output] for source, output in node.inputs]
        moved = sum(each.bytes or 0 for each in (*taken, *node.outputs))
        kind = node.type
        if node.attributes.get("transpose_b"):
            kind += ", second transposed"
        elif node.attributes.get("transpose_a"):
            kind += ", first transposed"
        found[_plain(node.name)] = (kind, moved, operations(node, taken), seconds(node, taken, rules.of(node).rates))
    return found


def _plain(name: str) -> str:
    """Return the name without the number that TensorFlow gives a scope it has seen before."""
    scope, slash, rest = name.partition("/")
    stem, _, number = scope.rpartition("_")
    return (stem if stem and number.isdigit() else scope) + slash + rest


def combine(runs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each kind of operation, those that take most first, and the variation."""
    kinds: dict[str, list[tuple[float, int, float, float]]] = collections.defaultdict(list)
    variation = []
    for run in runs:
        for name, times in run["took"].items():
            if name not in run["work"]:
                continue
            kind, *work = run["work"][name]
            kinds[kind].append((statistics.median(times), *work))
            if len(times) >= STEPS and min(times) > 3e-4:
                variation.append(statistics.pstdev(math.log(each) for each in times))
    rows = []
    for kind, seen in kinds.items():
        seconds = sum(each[0] for each in seen)
        rows.append(
            {
                "operation": kind,
                "count": len(seen),
                "seconds": round(seconds, 6),
                "seconds_by_rates": round(sum(each[3] for each in seen), 6),
                "gigabytes_per_second": round(sum(each[1] for each in seen) / seconds / 1e9, 2) if seconds else None,
                "gigaflops_per_second": round(sum(each[2] for each in seen) / seconds / 1e9, 1) if seconds else None,
            }
        )
    return sorted(rows, key=lambda row: -row["seconds"]), round(statistics.median(variation), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=["onednn", "eigen"])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.models[0])))
        return
    found = {}
    for kind in options.kernels:
        rows, variation = combine([_measured(name, kind) for name in options.models])
        found[kind] = {"variation": variation, "rows": rows}
        for row in rows[:25]:
            print(
                f"{kind:8} {row['operation']:40} {row['count']:5} {row['seconds']:9.4f} s, "
                f"{row['seconds_by_rates']:9.4f} s by the rates, {row['gigabytes_per_second']:8.2f} GB/s "
                f"{row['gigaflops_per_second']:8.1f} GFLOP/s",
                file=sys.stderr,
            )
        print(f"variation {variation}", file=sys.stderr)
    settings = {"models": options.models, "steps": STEPS, "load_average": round(os.getloadavg()[0], 1)}
    write_results(
        "op_costs", {"environment": environment("tensorflow", "keras"), "settings": settings, "kernels": found}
    )


def _measured(name: str, kind: str) -> dict[str, Any]:
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT), "TF_CPU_ALLOCATOR_USE_BFC": "true"}
    variables["TF_ENABLE_ONEDNN_OPTS"] = str(int(kind == "onednn"))
    done = subprocess.run(
        [sys.executable, __file__, name, "--one"], capture_output=True, text=True, env={**os.environ, **variables}
    )
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return run


if __name__ == "__main__":
    main()
