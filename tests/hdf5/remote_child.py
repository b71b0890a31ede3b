"""Child processes of the remote tests: interrupted training, and a shared cache.

remote_child.py interrupted URL
remote_child.py cached URL CACHE CACHE_SIZE [forever]
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np


def interrupted(url):
    from kerasmem import H5ChunkSequence

    train = H5ChunkSequence(url, batch_size=8, memory_budget="2MiB")
    print("ready", flush=True)
    while True:  # until the server falls silent, and then for ever
        for _ in train.next_epoch():
            pass


def cached(url, folder, size, forever=""):
    from kerasmem import H5ChunkSequence

    while True:
        with H5ChunkSequence(
            url, batch_size=50, memory_budget="2MiB", remote={"cache": folder, "cache_size": size}
        ) as train:
            total = sum(float(np.sum(x, dtype="f8")) for x, y in train.next_epoch())
            print(f"{total:.6f}", flush=True)
        if not forever:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
