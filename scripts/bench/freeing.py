#!/usr/bin/env python3
"""Train many models in one process and measure the memory left after each, on the device and on the host.

    python scripts/bench/freeing.py [--models 200]

Each model (three dense layers and Adam, 11 MB) is built, compiled, trained for one step and deleted; then
`keras.utils.clear_session()` and `gc.collect()` run, or `kerasmem.clear_session()`. The device is TensorFlow's own
allocator, which counts to the byte (`TF_CPU_ALLOCATOR_USE_BFC`); the host is the process's own pages after free heap
was returned. With XLA, and with Keras's function, which keeps every model, a tenth of the models is enough.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

from common import answer_of, environment, tensorflow_environ, write_results

SETTLED = 10  # models after which TensorFlow and the heap have set up what they set up once


def train(units: int, jit_compile: bool) -> None:
    import keras
    import numpy as np

    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((units,)), dense(units, "relu"), dense(units, "relu"), dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit_compile)
    model.fit(np.ones((8, units), "float32"), np.zeros(8, "int32"), verbose=0)


def loop(way: str, execution: str, models: int) -> list[dict[str, Any]]:
    """Return the memory held after each model. Runs in a new process."""
    import keras
    import tensorflow as tf

    import kerasmem
    from kerasmem.devices.host import held_bytes

    rows = []
    for _ in range(models):
        train(672, execution == "xla")
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
    rows = answer_of(__file__, "--child", way, execution, models, environ=tensorflow_environ())
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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200, help="models to train. Defaults to 200")
    options = parser.parse_args()
    few = max(SETTLED + 2, options.models // 10)
    ways = []
    for way, execution, models in (
        ("keras", "graph", few), ("keras", "xla", few), ("kerasmem", "xla", few), ("kerasmem", "graph", options.models),
    ):  # fmt: skip
        ways.append(measure(way, execution, models))
        print(json.dumps(ways[-1]), flush=True)
    settings = {"models": options.models, "settled_after": SETTLED}
    write_results("freeing", {"environment": environment("tensorflow", "keras"), "settings": settings, "ways": ways})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print("\n" + json.dumps(loop(*sys.argv[2:4], int(sys.argv[4]))))
    else:
        main()
