"""Run by `test_transform_processes.py`: start worker processes, print their IDs, and wait to be killed."""

from __future__ import annotations

import os
import time


def note_process(x):
    time.sleep(0.2)
    return (os.getpid(),)


if __name__ == "__main__":
    from concurrent.futures import ThreadPoolExecutor

    from kerasmem.streaming.workers import TransformPool

    pool = TransformPool(note_process, 2)
    with ThreadPoolExecutor(4) as threads:  # which end, and their processes do not
        result = list(threads.map(pool.run, [(number,) for number in range(8)]))
    result += [pool.run((0,))]
    print(*sorted({process for (process,) in result}), flush=True)
    time.sleep(600)
