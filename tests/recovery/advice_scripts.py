"""Run scripts that `kerasmem.advise` gave, and measure the steps of the models that they train: advice_scripts.py.

Standard input has a JSON list of scripts; the answer, the last line, has for each the peaks of some steps in bytes, or
why it failed. The environment must have TF_CPU_ALLOCATOR_USE_BFC=true.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

STEPS = 8
ROOT = Path(__file__).resolve().parent.parent.parent


def measured(scripts, *, folder=None, timeout=280):
    """Run scripts in a process of their own, one after another, and return the answer for each.

    What one leaves in memory counts for the next: only the first is measured as it would run alone.
    """
    done = subprocess.run(
        [sys.executable, __file__],
        check=False,
        input=json.dumps(list(scripts)),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3",
             "CUDA_VISIBLE_DEVICES": "-1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def peaks_of(code):
    """Run a script; before its last line, which trains, some steps of its model on one batch of its arrays."""
    import keras
    import tensorflow as tf

    from kerasmem.training.steps.division import Division
    from kerasmem.training.steps.micro import MicroStep

    def peak():
        return tf.config.experimental.get_memory_info("CPU:0")["peak"]

    names: dict[str, object] = {"__name__": "__main__"}
    pieces = re.search(r"micro_batches=(\d+)", code)
    *before, last = code.splitlines()
    assert ".fit(" in last
    exec(compile("\n".join(before), "script", "exec"), names)
    model, batch = names["model"], int(re.search(r"batch_size=(\d+)", last)[1])
    if pieces:  # the batch stays on the host, which on a CPU is the same allocator: so its steps, without the pipeline
        step = MicroStep(model, Division(model))
        x, y = (keras.tree.map_structure(lambda each: each[:batch], names[key]) for key in "xy")

        def train():
            return step.train((x, y), -(-batch // int(pieces[1])))
    else:
        x, y = (keras.tree.map_structure(lambda each: tf.constant(each[:batch]), names[key]) for key in "xy")
        model.make_train_function(force=True)

        def train():
            return model.train_function(iter([(x, y)]))

    peaks = []
    for _ in range(STEPS + 2):
        tf.config.experimental.reset_memory_stats("CPU:0")
        logs = train()
        keras.tree.map_structure(float, logs)
        del logs
        peaks.append(peak())
    exec(compile(last, "script", "exec"), names)
    return peaks[2:]


def main():
    """Run every script."""
    import keras

    sys.path.insert(0, os.getcwd())  # as for a script in that folder
    answers = []
    for code in json.loads(sys.stdin.read()):
        try:
            answers.append(peaks_of(code))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
        keras.backend.clear_session()
        keras.config.set_dtype_policy("float32")
        gc.collect()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
