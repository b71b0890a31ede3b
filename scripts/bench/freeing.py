#!/usr/bin/env python3
"""Many models trained in one process, and what of them is left after each, on the device and on the host.

    python scripts/bench/freeing.py [--models 200] [--quick]

Each model (three dense layers and Adam, 11 MB) is built, compiled, trained for one step and deleted; then comes
`keras.utils.clear_session()` and `gc.collect()`, or `kerasmem.clear_session()`. The device is TensorFlow's own
allocator, which counts to the byte (`TF_CPU_ALLOCATOR_USE_BFC`); the host is the process's own pages after free heap
went back. With XLA, and with Keras's function, which keeps every model, a tenth of the models tell.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

from environment import ROOT, environment, write_results

sys.path.insert(0, str(ROOT))
WAYS = ("kerasmem", "keras")
SETTLED = 10  # models after which what TensorFlow and the heap set up once is there


def train(units: int, jit_compile: bool) -> None:
    import keras
    import numpy as np

    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((units,)), dense(units, "relu"), dense(units, "relu"), dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit_compile)
    model.fit(np.ones((8, units), "float32"), np.zeros(8, "int32"), verbose=0)


def loop(way: str, jit_compile: bool, models: int) -> list[dict[str, Any]]:
    """Return what is held after each model."""
    import keras
    import tensorflow as tf

    import kerasmem
    from kerasmem.devices.host import held_bytes

    rows = []
    for _ in range(models):
        train(672, jit_compile)
        begin = time.perf_counter()
        if way == "keras":
            keras.utils.clear_session()
            gc.collect()
        else:
            kerasmem.clear_session()
        seconds = time.perf_counter() - begin
        device = tf.config.experimental.get_memory_info("CPU:0")["current"]
        rows.append({"device_bytes": device, "host_bytes": held_bytes(), "seconds": seconds})
    return rows


def measure(way: str, execution: str, models: int) -> dict[str, Any]:
    """Run a loop in a process of its own and sum it up."""
    arguments = ["--way", way, "--execution", execution, "--models", str(models)]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}, {execution}: {done.stderr[-2000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])
    device, host = [[row[name] for row in rows] for name in ("device_bytes", "host_bytes")]
    settled = min(SETTLED, models - 1)
    return {
        "way": way,
        "execution": execution,
        "models": models,
        "device_bytes": {"first": device[0], "last": device[-1], "largest": max(device)},
        "host_growth_bytes": {"from first": host[-1] - host[0], f"from {settled + 1}": host[-1] - host[settled]},
        "host_growth_bytes_per_model": (host[-1] - host[settled]) / max(1, models - 1 - settled),
        "seconds_of_a_call": statistics.median(row["seconds"] for row in rows),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="3 models in graph mode, nothing written")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--execution", choices=("graph", "xla"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print("\n" + json.dumps(loop(options.way, options.execution == "xla", options.models)))
        return
    few = max(SETTLED + 2, options.models // 10)
    plan = [("keras", "graph", few), ("keras", "xla", few), ("kerasmem", "xla", few)]
    plan.append(("kerasmem", "graph", options.models))
    found = []
    for way, execution, models in [("kerasmem", "graph", 3)] if options.quick else plan:
        found.append(measure(way, execution, models))
        line = {name: value for name, value in found[-1].items() if name != "rows"}
        print(json.dumps(line), file=sys.stderr, flush=True)
    if options.quick:
        print(json.dumps(found[0]["device_bytes"]))
        return
    data = {
        "command": f"python scripts/bench/freeing.py --models {options.models}",
        "environment": environment("tensorflow", "keras"),
        "settings": {"settled_after": SETTLED, "machine": "CPU, BFC allocator"},
        "ways": found,
    }
    write_results("freeing", data)


if __name__ == "__main__":
    main()
