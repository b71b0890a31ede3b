"""`bench_data`: what a file can deliver on this machine, and which step of the way limits it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from kerasmem.datatools.inspecting.advice import stream_line
from kerasmem.datatools.inspecting.inspection import choose_pair
from kerasmem.datatools.inspecting.listing import list_contents
from kerasmem.datatools.inspecting.results import Bench, Stage
from kerasmem.datatools.inspecting.rows import read_windows
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.settings import read_path, read_whole
from kerasmem.units import MIB, parse_size

_REPEATS = 3
_READ_BYTES = 4 * MIB
_CLEAR = 1.25  # of the next one: a stage that takes less longer than that is not called the limit


def bench_data(
    path: str | os.PathLike[str],
    x: str | None = None,
    y: str | None = None,
    *,
    batch_size: int = 32,
    sample: int | str = 256 * MIB,
    progress: Callable[[str, int, int], None] | None = None,
    **settings: Any,
) -> Bench:
    """Return what `H5ChunkSequence` delivers from a file here, and what limits it.

    An epoch over the first rows of the file is run with the system's cache of it emptied (where that is possible) and
    then several times with the file in the cache, of which the best counts. Beside that the steps are timed by
    themselves, with as many threads as in training: the bytes from the disk and from the cache, unpacking, conversion;
    what remains is copying rows into windows and batches.

    Args:
        path: the HDF5 file.
        x: the dataset of the features; None for the one that looks most like them.
        y: that of the targets; None for the same.
        batch_size: rows a batch.
        sample: bytes of the file to look at, such as "1GiB". One that exceeds the windows shows how training goes on
            in a file that exceeds memory.
        progress: called with what goes on, the steps done and all steps.
        settings: handed on to `H5ChunkSequence`.

    Raises:
        DataError: the file cannot be read.
        UsageError: a setting is wrong.

    Example:
        >>> import h5py, numpy as np
        >>> with h5py.File("/tmp/bench.h5", "w") as f:
        ...     f["x"], f["y"] = np.zeros((4096, 64), "f4"), np.arange(4096) % 10
        >>> bench_data("/tmp/bench.h5").warm_seconds > 0
        True
    """
    from kerasmem.streaming.sequence import H5ChunkSequence

    steps = 3 + 2 * _REPEATS
    tell = progress or (lambda what, done, total: None)
    contents = list_contents(read_path(path))
    x, y = choose_pair(contents, x, y)
    if x is None:
        raise DataError(
            f"{shown(contents.path)}: holds nothing that could be trained from; kerasmem data inspect says why"
        )
    batch_size = read_whole("batch_size", batch_size, 1)
    names = [x] if y is None else [x, y]
    entries = [entry for entry in contents.usable if entry.name in names]
    known = [(e.name, e.layout.dtype, e.layout.row_shape) for e in entries if e.layout is not None]
    rows = min(entry.layout.rows for entry in entries if entry.layout is not None)
    per_row = sum(entry.stored_bytes / rows for entry in entries)
    count = _sample_rows(rows, per_row, parse_size(sample, field="sample"), batch_size, entries)
    line = stream_line(contents.path, known, batch_size, x=x, y=y)
    given = {"batch_size": batch_size, "shuffle": y is not None, **settings}
    if "scale=" in line:
        given.setdefault("scale", 1 / 255)
    with H5ChunkSequence(contents.path, x, y, rows=(0, count), **given) as sequence:
        delivered = count * sum(column.row_bytes for column in sequence._columns)
        stored = round(count * per_row)
        threads = sequence.plan.threads
        tell("disk", 1, steps)
        disk = _time_raw(contents.path, stored) if _forget(contents.path) else None
        memory = min(_time_raw(contents.path, stored) for _ in range(_REPEATS))
        tell("unpacking and conversion", 2, steps)
        alone = {kind: _time_rows(contents.path, names, count, kind, threads) for kind in ("stored", "float32")}
        tell("cold", 3, steps)
        cold = _time_epoch(sequence) if _forget(contents.path) else None
        sequence.close()
        warm = []
        for repeat in range(_REPEATS):
            tell("warm", 4 + repeat, steps)
            warm.append(_time_epoch(sequence))
            sequence.close()
        converts = any(column.converts for column in sequence._columns)
    packed = any(entry.layout is not None and entry.layout.filters for entry in entries)
    seconds = min(warm)
    unpacking = max(alone["stored"] - memory, 0.0) if packed else None
    conversion = max(alone["float32"] - alone["stored"], 0.0) if converts else None
    copying = max(seconds - sum(part for part in (memory, unpacking, conversion) if part is not None), 0.0)
    stages = (
        Stage("disk", disk, _rate(stored, disk), "stored"),
        Stage("memory", memory, _rate(stored, memory), "stored"),
        Stage("unpacking", unpacking, _rate(stored, unpacking), "stored", threads),
        Stage("conversion", conversion, _rate(delivered, conversion), "delivered", threads),
        Stage("copying", copying, _rate(delivered, copying), "delivered"),
    )
    warm_limit = _slowest([stage for stage in stages if stage.name != "disk"])
    limit = _slowest(stages) if disk is not None else warm_limit
    return Bench(
        contents.path, line, count, batch_size, stored, delivered, cold, seconds, stages, limit, warm_limit,
        _advice(limit, threads, packed=packed),
    )  # fmt: skip


def _sample_rows(rows: int, per_row: float, sample: int, batch_size: int, entries: Sequence[Any]) -> int:
    if sample < 1:
        raise UsageError("sample: give at least one byte")
    wanted = max(1, int(sample / max(per_row, 1e-9)))
    chunk = max(entry.layout.chunk_rows for entry in entries)
    wanted = -(-wanted // chunk) * chunk
    return min(rows, max(wanted, batch_size))


def _time_epoch(sequence: Any) -> float:
    """Go through an epoch as `fit` does, which gets batches as views of the window."""
    started = time.perf_counter()
    for _ in sequence.next_epoch():
        pass
    return time.perf_counter() - started


def _time_rows(path: str, names: Sequence[str], rows: int, dtype: str, threads: int) -> float:
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for _window in read_windows([path], names, stop=rows, dtype=dtype, threads=threads):
            pass
        times.append(time.perf_counter() - started)
    return min(times)


def _time_raw(path: str, size: int) -> float:
    """Read so many bytes of the file in order."""
    buffer = bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        started = time.perf_counter()
        left = size
        while left > 0:
            got = file.readinto(buffer)
            if not got:
                file.seek(0)
                if not os.fstat(file.fileno()).st_size:
                    break
                continue
            left -= got
        return time.perf_counter() - started


def _forget(path: str) -> bool:
    """Ask the system to drop the file from its cache; return whether it is known how to."""
    if not hasattr(os, "posix_fadvise"):
        return False
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    finally:
        os.close(number)
    return True


def _rate(size: int, seconds: float | None) -> float | None:
    return size / seconds if seconds else None


def _slowest(stages: Sequence[Stage]) -> str:
    """Return the stage that takes longest, or the two that do."""
    times = sorted(((stage.seconds or 0.0), stage.name) for stage in stages)
    if len(times) > 1 and times[-1][0] < _CLEAR * times[-2][0]:
        return f"{times[-1][1]} and {times[-2][1]}"
    return times[-1][1]


def _advice(limit: str, threads: int, *, packed: bool) -> str:
    first = limit.split(" and ")[0]
    texts = {
        "disk": "the disk limits: "
        + (
            "a faster disk, or stronger compression"
            if packed
            else "a faster disk, or kerasmem data repack --compression zstd"
        ),
        "unpacking": f"unpacking limits, with {threads} threads: more cores, or kerasmem data repack --compression "
        "none",
        "conversion": "conversion to float32 limits: store float32, or integers with scale=",
        "copying": "copying rows into batches limits: a larger batch_size costs less a row",
        "memory": "the memory of this machine limits; the file is as fast as files get",
    }
    return texts[first]
