"""One process that goes through its part of a file each time it is told to, and says what that took.

Started by scale.py with one argument of JSON. It answers on its original standard output, a line of JSON each: what it
is, then, for every line it is sent, a pass. The loaders of streaming_peers_child.py are taken from there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Epoch = Callable[[], Iterable[Any]]


def kerasmem(spec: dict[str, Any]) -> Epoch:
    """Return the epochs of this worker's shard, shuffled."""
    sys.path.insert(0, spec["root"])
    from kerasmem import H5ChunkSequence

    shard = (spec["index"], spec["count"])
    stream = H5ChunkSequence(
        spec["path"], "x", None, batch_size=spec["batch"], shard=shard, memory_budget=spec["budget"]
    )
    return stream.next_epoch


def h5py(spec: dict[str, Any]) -> Epoch:
    """Return slices of this worker's part of the rows, in file order."""
    import h5py as library

    data = library.File(spec["path"], "r")["x"]
    first, last = (spec["rows"] * (spec["index"] + more) // spec["count"] for more in (0, 1))

    def epoch() -> Iterator[Any]:
        for start in range(first, last, spec["batch"]):
            yield (data[start : min(start + spec["batch"], last)],)

    return epoch


def peer(spec: dict[str, Any]) -> Epoch:
    """Return a loader of streaming_peers_child.py, in blocks of rows shuffled together."""
    import streaming_peers_child as others

    form = {"grain": "blocks, threads", "tf.data": "blocks, from_generator"}[spec["loader"]]
    return others.PEERS[spec["loader"]][0](spec, form)


def go_through(epoch: Epoch, limit: float | None) -> dict[str, Any]:
    """Go through the data once, or until the time is over."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM
    before, read, rows, begin = memory("VmRSS"), bytes_read(), 0, time.perf_counter()
    for batch in epoch():
        rows += len(batch[0]) if isinstance(batch, tuple) else len(batch)
        if limit is not None and time.perf_counter() - begin > limit:
            break
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds, "rows": rows, "bytes_read": bytes_read() - read, "grown_bytes": memory("VmHWM") - before,
    }  # fmt: skip


def memory(field: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def bytes_read() -> int:
    """Return what this process has asked the system to read, from whatever file."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes elsewhere
    loader = {"kerasmem": kerasmem, "h5py": h5py}.get(spec["loader"], peer)
    epoch = loader(spec)
    versions = {"python": sys.version.split()[0]}
    for name in ("h5py", "numpy", "tensorflow", "grain", "keras"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            versions[name] = module.__version__
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    limit = None if spec["loader"] == "kerasmem" else spec["seconds"]
    for _ in sys.stdin:
        print(json.dumps(go_through(epoch, limit)), file=answers, flush=True)


if __name__ == "__main__":
    main()
