"""Run by test_faults.py: train on a file until Ctrl-C.

    interrupted.py FILE SETTINGS HANDLED

Says "training" once it is under way. Where HANDLED is "yes" it catches the interrupt, closes the sequence, and
says which threads and processes are left; else the interrupt ends it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
from streams import slow_double

from kerasmem import H5ChunkSequence


def main(file: str, settings: str, handled: str) -> None:
    before = {thread.name for thread in threading.enumerate()}
    options = json.loads(settings)
    stream = H5ChunkSequence(file, batch_size=8, memory_budget="20kB", transform=slow_double, **options)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def note(batch, logs):
        if batch == 20:
            print("training", flush=True)

    try:
        started = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        model.fit(stream, epochs=10_000, verbose=0, callbacks=[started])
    except KeyboardInterrupt:
        if handled != "yes":
            raise
        rows = [row for _, y in stream for row in y.tolist()]  # it is of use yet
        stream.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            names = {thread.name for thread in threading.enumerate()} - before
            left = sorted(name for name in names if name.startswith("kerasmem"))
            if not left and not multiprocessing.active_children():
                break
            time.sleep(0.01)
        print(
            json.dumps({"rows": len(set(rows)), "threads": left, "processes": len(multiprocessing.active_children())})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
