"""Run by test_convert_kill.py in a process of its own: convert, and kill this process with SIGKILL at a point.

    convert_killed.py SETTINGS_JSON POINT COUNT

POINT is "checkpoint" (before one is written), "after" (after it), "put" (within the chunks between), "flush" (of the
buckets), "place" (as files are moved), "sums" (as checksums are written) or "never"; COUNT says at which of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys


def die_at(module, owner, name, count, after=False):
    target = getattr(module, owner) if owner else module
    original = getattr(target, name)
    calls = [0]

    def replaced(*arguments, **options):
        calls[0] += 1
        if calls[0] == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if calls[0] == count and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(target, name, replaced)


def main(settings: str, point: str, count: str) -> None:
    from kerasmem.datatools.converting import bucket_file, chunk_store, conversion, job, running

    job.CHECKPOINT_BYTES = 64 << 10
    given = json.loads(settings)
    store = "PlainStore" if given.get("compression", "none") == "none" else "PackedStore"
    points = {
        "checkpoint": (job, "Job", "checkpoint", False),
        "after": (job, "Job", "checkpoint", True),
        "put": (chunk_store, store, "put", False),
        "flush": (bucket_file, "BucketFile", "flush", True),
        "place": (os, "", "replace", True),
        "state": (os, "", "replace", False),
        "sums": (running.h5py, "", "File", True),
    }
    if point != "never":
        module, owner, name, after = points[point]
        die_at(module, owner, name, int(count), after)
    done = conversion.convert(given.pop("sources"), given.pop("output"), **given)
    print(json.dumps({"resumed_rows": done.resumed_rows, "crc": [dataset.crc32 for dataset in done.datasets]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
