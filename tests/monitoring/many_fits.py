"""Many short fits with a `MemoryLogger` each, in all the ways in which a fit can end; prints how each ended.

    python many_fits.py COUNT

Each begins at another depth of the stack, while other threads collect garbage and make new objects. One in three
raises: in another callback, in the data, or by Ctrl-C; and some of the tracebacks are kept for a while.
"""

import collections
import contextlib
import faulthandler
import gc
import json
import sys
import threading
import time

faulthandler.enable()

import keras  # noqa: E402
import numpy as np  # noqa: E402

from kerasmem import MemoryLogger  # noqa: E402

KEPT = collections.deque(maxlen=3)  # exceptions, and with them their frames


class BoomError(Exception):
    pass


class RaiseAt(keras.callbacks.Callback):
    def __init__(self, hook, error):
        super().__init__()
        setattr(self, hook, self.boom)
        self.error = error

    def boom(self, *args, **options):
        raise self.error


class Broken(keras.utils.PyDataset):
    """Data that cannot be read from the third batch on."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index > 1:
            raise BoomError("data")
        return np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


def deep(depth, action):
    """Call an action from so many frames down, each with local variables that come and go."""
    here = [depth] * 3
    result = deep(depth - 1, action) if depth else action()
    del here
    return result


def disturb(stop, collects):
    """Collect garbage, or make some in deep stacks of this thread's own, until told to stop."""
    while not stop.is_set():
        if collects:
            gc.collect(1)
        else:
            deep(50, lambda: [object() for _ in range(1000)])
        time.sleep(0.005)


def one_fit(number, model, x, y):
    logger = MemoryLogger(sampling=(20, 1000)[number % 2], memory_growth=False)
    options = {"verbose": 0, "batch_size": 4, "callbacks": [logger]}
    turn = number % 9
    if turn == 0:
        options["callbacks"].append(RaiseAt("on_train_batch_end", BoomError("batch")))
    elif turn == 3:
        options["callbacks"].append(RaiseAt("on_epoch_end", KeyboardInterrupt()))
    elif turn == 6:
        x, y = Broken(), None
        del options["batch_size"]
    elif turn == 7:
        options["validation_data"] = (x, y)
    model.fit(x, y, **options)
    assert logger.timeline.max("rss_bytes") > 0


def main(count):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")
    model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0)
    gc.collect()
    gc.freeze()
    stop = threading.Event()
    others = [threading.Thread(target=disturb, args=(stop, collects), daemon=True) for collects in (True, False)]
    for thread in others:
        thread.start()
    ended = collections.Counter()
    for number in range(count):
        try:
            deep(number * 37 % 300, lambda number=number: one_fit(number, model, x, y))
            ended["well"] += 1
        except (Exception, KeyboardInterrupt) as error:  # TensorFlow's own around what the data raised
            ended["BoomError" if "BoomError" in str(error) or type(error) is BoomError else type(error).__name__] += 1
            if number % 2:
                KEPT.append(error)
    stop.set()
    for thread in others:
        thread.join()
    KEPT.clear()
    gc.collect()  # takes seconds after thousands of fits
    deadline = time.monotonic() + 60
    while _samplers() and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()  # again, for one that finds another thread collecting returns at once
    with contextlib.suppress(BrokenPipeError):
        print("RESULT", json.dumps({**ended, "threads left": _samplers()}))


def _samplers():
    return sum(thread.name == "kerasmem sampler" for thread in threading.enumerate())


if __name__ == "__main__":
    main(int(sys.argv[1]))
