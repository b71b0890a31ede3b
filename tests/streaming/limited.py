"""Run by test_stream_memory.py: train from a file, or load it, under a memory limit.

    limited.py train|load FILE LIMIT_BYTES|+HEADROOM_BYTES BUDGET

The limit is RLIMIT_DATA: what the process may allocate privately, whatever the machine has. "+N" sets it to
N more than TensorFlow has taken once it is up and has trained on a few rows. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import sys


def status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def limit_data(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def main(task: str, path: str, limit: str, budget: str) -> None:
    if not limit.startswith("+"):
        limit_data(int(limit))
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import h5py
    import keras
    import numpy as np

    from kerasmem import H5ChunkSequence

    with h5py.File(path) as file:
        rows, width = file["x"].shape
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((64, width), "f4"), np.zeros(64), verbose=0)
    before, baseline = status("VmRSS"), status("VmData")
    if limit.startswith("+"):
        limit_data(baseline + int(limit))
    result = {"task": task, "baseline_data": baseline}
    if task == "load":
        try:
            with h5py.File(path) as file:
                x = file["x"][:]
            model.fit(x, np.zeros(rows), batch_size=256, verbose=0)
            result["loaded"] = True
        except MemoryError as error:
            result.update(loaded=False, error=str(error))
    else:
        stream = H5ChunkSequence(path, batch_size=256, memory_budget=budget)
        history = model.fit(stream, verbose=0).history
        reader = stream.open_stream().reader
        result.update(loss=history["loss"][0], rows=rows, rows_read=reader.rows_read)
    result.update(data=status("VmData"), grown=status("VmHWM") - before)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
