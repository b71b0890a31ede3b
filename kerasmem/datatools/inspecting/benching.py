"""`bench_data`: what a file can deliver on this machine, and which step of the way limits it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kerasmem import checks
from kerasmem.datatools.inspecting.advice import known, largest_value, stream_line
from kerasmem.datatools.inspecting.inspection import choose_pair
from kerasmem.datatools.inspecting.listing import list_contents
from kerasmem.datatools.inspecting.results import Bench, Stage
from kerasmem.datatools.progress import Progress
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import DatasetLayout, shown
from kerasmem.hdf5.settings import read_path
from kerasmem.streaming.file_order import read_windows
from kerasmem.units import MIB, parse_size

if TYPE_CHECKING:
    from kerasmem.streaming.sequence import H5ChunkSequence

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
    progress: Progress | None = None,
    **settings: Any,
) -> Bench:
    """Return what `H5ChunkSequence` delivers from a file here, and what limits it.

    An epoch over the first rows of the file is run with the system's cache of it emptied (where that is possible) and
    then several times with the file in the cache; the best of these counts. Beside that the steps are timed by
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

    Examples:
        >>> import h5py, numpy as np
        >>> with h5py.File("/tmp/bench.h5", "w") as f:
        ...     f["x"], f["y"] = np.zeros((4096, 64), "f4"), np.arange(4096) % 10
        >>> bench_data("/tmp/bench.h5").warm_seconds > 0
        True
    """
    from kerasmem.streaming.sequence import H5ChunkSequence

    contents = list_contents(read_path(path))
    x, y = choose_pair(contents, x, y)
    if x is None:
        raise DataError(
            f"{shown(contents.path)}: holds nothing that could be trained from; kerasmem data inspect says why"
        )
    layouts = [contents.usable[name] for name in dict.fromkeys((x, y)) if name is not None]
    batch_size = checks.whole("batch_size", batch_size)
    line = stream_line(contents.path, [known(layout) for layout in layouts], batch_size, x=x, y=y)
    per_row = sum(layout.stored_bytes / layouts[0].rows for layout in layouts)
    count = _sample_rows(layouts, per_row, parse_size(sample, field="sample"), batch_size)
    most = largest_value(*known(contents.usable[x])[1:])
    given = {"batch_size": batch_size, "shuffle": y is not None, **({} if most is None else {"scale": 1 / most})}
    stored = round(count * per_row)
    with H5ChunkSequence(contents.path, x, y, rows=(0, count), **{**given, **settings}) as sequence:
        threads, columns = sequence.plan.threads, sequence.columns
        times = _time_all(
            sequence, [layout.name for layout in layouts], stored, progress or (lambda what, done, total: None)
        )
    delivered = count * sum(column.row_bytes for column in columns)
    packed, converts = any(layout.filters for layout in layouts), any(column.converts for column in columns)
    stages = _stages(times, {"stored": stored, "delivered": delivered}, threads, packed=packed, converts=converts)
    warm_limit = _slowest(stages[1:])
    limit = _slowest(stages) if times["disk"] is not None else warm_limit
    return Bench(
        contents.path, line, count, batch_size, stored, delivered, times["cold"], times["warm"] or 0.0, stages, limit,
        warm_limit, _advice(limit, threads, packed=packed),
    )  # fmt: skip


_Times = dict[str, float | None]
"""Seconds for the rows of the sample; None where that cannot be measured."""


def _time_all(sequence: H5ChunkSequence, names: Sequence[str], stored: int, tell: Progress) -> _Times:
    """Time an epoch of a sequence, and the steps of the way one by one."""
    (path,), rows, threads = sequence.paths, sequence.num_rows, sequence.plan.threads
    steps = 3 + 2 * _REPEATS
    tell("disk", 1, steps)
    times: _Times = {"disk": _timed(_raw_reads(path, stored)) if _forget(path) else None}
    times["memory"] = min(_timed(_raw_reads(path, stored)) for _ in range(_REPEATS))
    tell("unpacking and conversion", 2, steps)
    for kind in ("stored", "float32"):
        windows = (read_windows([path], names, stop=rows, dtype=kind, threads=threads) for _ in range(_REPEATS))
        times[kind] = min(map(_timed, windows))
    tell("cold", 3, steps)
    # an epoch as `fit` goes through it, which gets batches as views of the window
    times["cold"] = _timed(sequence.next_epoch()) if _forget(path) else None
    warm = []
    for repeat in range(_REPEATS):
        sequence.close()
        tell("warm", 4 + repeat, steps)
        warm.append(_timed(sequence.next_epoch()))
    return {**times, "warm": min(warm)}


def _stages(
    times: _Times, sizes: Mapping[str, int], threads: int, *, packed: bool, converts: bool
) -> tuple[Stage, ...]:
    """Return how long each step takes by itself: what one way takes longer than another that does a step less."""
    memory, stored, converted, warm = (times[name] or 0.0 for name in ("memory", "stored", "float32", "warm"))
    unpacking = max(stored - memory, 0.0) if packed else None
    conversion = max(converted - stored, 0.0) if converts else None
    copying = max(warm - memory - (unpacking or 0.0) - (conversion or 0.0), 0.0)

    def stage(name: str, seconds: float | None, of: str, threads: int = 1) -> Stage:
        return Stage(name, seconds, sizes[of] / seconds if seconds else None, of, threads)

    return (
        stage("disk", times["disk"], "stored"),
        stage("memory", memory, "stored"),
        stage("unpacking", unpacking, "stored", threads),
        stage("conversion", conversion, "delivered", threads),
        stage("copying", copying, "delivered"),
    )


def _sample_rows(layouts: Sequence[DatasetLayout], per_row: float, sample: int, batch_size: int) -> int:
    if sample < 1:
        raise UsageError("sample: give at least one byte")
    chunk = max(layout.chunk_rows for layout in layouts)
    wanted = -(-max(1, int(sample / max(per_row, 1e-9))) // chunk) * chunk
    return min(*(layout.rows for layout in layouts), max(wanted, batch_size))


def _timed(work: Iterator[Any]) -> float:
    """Go through an iterator; return the seconds that it takes."""
    started = time.perf_counter()
    for _ in work:
        pass
    return time.perf_counter() - started


def _raw_reads(path: str, size: int) -> Iterator[int]:
    """Read so many bytes of the file in order, from its beginning again where it holds fewer."""
    buffer = bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        left = size
        while left > 0 and os.fstat(file.fileno()).st_size:
            got = file.readinto(buffer)
            if not got:
                file.seek(0)
            left -= got
            yield got


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


def _slowest(stages: Sequence[Stage]) -> str:
    """Return the stage that takes longest, or the two that do."""
    times = sorted(((stage.seconds or 0.0), stage.name) for stage in stages)
    if len(times) > 1 and times[-1][0] < _CLEAR * times[-2][0]:
        return f"{times[-1][1]} and {times[-2][1]}"
    return times[-1][1]


def _advice(limit: str, threads: int, *, packed: bool) -> str:
    other = "stronger compression" if packed else "kerasmem data repack --compression zstd"
    return {
        "disk": f"the disk limits: a faster disk, or {other}",
        "unpacking": f"unpacking limits, with {threads} threads: more cores, or kerasmem data repack --compression "
        "none",
        "conversion": "conversion to float32 limits: store float32, or integers with scale=",
        "copying": "copying rows into batches limits: a larger batch_size costs less a row",
        "memory": "the memory of this machine limits; the file is as fast as files get",
    }[limit.split(" and ")[0]]
