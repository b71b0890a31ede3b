"""Run the code of a remedy in a process of its own, and measure steps of the model that it trains.

The process reads a JSON object from standard input: `model` ("residual") of advised_models.py, its `arguments`,
`batch_size` and `code`. Its last line is a list of the peaks of some steps in bytes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

STEPS = 8
ROOT = Path(__file__).resolve().parents[2]


def measured(model, code, batch_size, timeout=280, **arguments):
    """Return the peaks of some steps of a model that the code has changed."""
    order = {"model": model, "arguments": arguments, "batch_size": batch_size, "code": code}
    done = subprocess.run(
        [sys.executable, __file__], check=False, input=json.dumps(order), capture_output=True, text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3",
             "CUDA_VISIBLE_DEVICES": "-1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def peaks_of(order):
    import advised_models
    import keras
    import numpy as np
    import tensorflow as tf

    import kerasmem
    from kerasmem.training.steps.engine import MicroStep

    names = {"keras": keras, "kerasmem": kerasmem, "tf": tf}
    before, rest = [], []
    for line in order["code"].splitlines():
        (before if "before the model is built" in line else rest).append(line)
    runs = [line for line in rest if ".fit(" in line]
    exec("\n".join(before), names)
    model = names["model"] = getattr(advised_models, order["model"])(**order["arguments"])
    names |= {"optimizer": model.optimizer, "loss": model.loss, "metrics": []}
    exec("\n".join(line for line in rest if line not in runs), names)
    model = names["model"]
    sizes = [re.search(r"batch_size=(\d+)", line) for line in runs]
    batch = int(sizes[0][1]) if sizes else order["batch_size"]
    x, y = (
        keras.tree.map_structure(lambda each: np.zeros((batch, *each.shape[1:]), each.dtype), tensors)
        for tensors in (model.input, model.output)
    )
    if runs and "micro_batches" in runs[0]:  # as `kerasmem.fit`, without its pipeline: a CPU has one allocator for both
        pieces = int(re.search(r"micro_batches=(\d+)", runs[0])[1])
        step = MicroStep(model)

        def train():
            return step.train((x, y), -(-batch // pieces))
    else:
        x, y = (keras.tree.map_structure(tf.constant, each) for each in (x, y))
        model.make_train_function(force=True)

        def train():
            return model.train_function(iter([(x, y)]))

    peaks = []
    for _ in range(STEPS + 2):
        tf.config.experimental.reset_memory_stats("CPU:0")
        logs = train()
        keras.tree.map_structure(float, logs)
        del logs
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    for line in runs:
        exec(line, {**names, "x": x, "y": y})
    return peaks[2:]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print("\n" + json.dumps(peaks_of(json.load(sys.stdin))))
