"""Convert in parts: an executor writes the parts, and the index of all comes last."""

from __future__ import annotations

import functools
import glob
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np

from kerasmem.datatools import indexing
from kerasmem.datatools.reports import Progress
from kerasmem.datatools.row_source import RowSource
from kerasmem.datatools.settings import ReadOptions, WriteOptions, check_outputs
from kerasmem.datatools.writing import Outcome, WritePlan, write_files
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.access import RemoteAccess, read_remote
from kerasmem.hdf5.io.remote_file import expand, refuse_web
from kerasmem.hdf5.rows.settings import INDEX_SUFFIX, read_place
from kerasmem.processes.executors import run_tasks

_PATTERN = f"part-{'[0-9]' * 5}.h5"


def read_index(output: Any, writing: WriteOptions) -> str:
    """Return the path or URL of the index to write.

    Raises:
        UsageError: If it cannot be one, or the settings need all rows in one file.
    """
    if writing.shuffle:
        raise UsageError(
            "shuffle and split need all rows in one place, and an index has parts. Name a file that ends with .h5, or "
            "leave them out: H5ChunkSequence shuffles as it reads, and its rows=… takes a part of the rows."
        )
    target = read_place(output)
    if not target.endswith(INDEX_SUFFIX):
        name = f"parts/train{INDEX_SUFFIX}"
        raise UsageError(f"output: an executor writes parts and an index of them. Name the index, such as {name}.")
    if is_url(target):
        refuse_web(target)
    return target


def write_parts(
    source: RowSource,
    plan: WritePlan,
    reading: ReadOptions,
    writing: WriteOptions,
    target: str,
    part_bytes: int,
    executor: Executor | None,
    progress: Progress,
    *,
    force: bool,
) -> Outcome:
    """Write a source's rows to files beside an index, and the index.

    Args:
        source: the source.
        plan: what would be written to one file.
        reading: how sources are read.
        writing: how files are written.
        target: path or URL of the index.
        part_bytes: size of the rows in a part.
        executor: writes the parts; None for this process.
        progress: called with the step, the rows done and all rows.
        force: overwrite an index and parts.
    """
    remote = read_remote(writing.remote)
    folder = target.rpartition("/")[0]
    _clear(folder, target, source.paths, remote, force=force)
    bounds = part_bounds(source, max(1, part_bytes // plan.row_bytes))
    outputs = [f"{folder}/part-{number:05}.h5" for number in range(len(bounds) - 1)]
    parts = [source.part(start, stop) for start, stop in itertools.pairwise(bounds)]
    write = functools.partial(_write_part, reading=replace(reading, threads=1), writing=writing)
    size, losses = 0, Counter[str]()
    for number, outcome in enumerate(run_tasks(executor, write, zip(parts, outputs, strict=True)), start=1):
        size += outcome.size
        losses += outcome.losses
        progress("writing", bounds[number], plan.rows)
    names = [field.name for field in plan.datasets]
    written = indexing.index(
        outputs, target, datasets=names, remote=writing.remote, executor=executor, progress=progress
    )
    return Outcome(size + written.index_bytes, losses)


def part_bounds(source: RowSource, rows: int) -> list[int]:
    """Return the first row of each part, and the number of rows.

    Parts have about as many rows, `rows` at most if the source can be read from any row; else they begin where it
    can be.
    """
    bounds = np.linspace(0, source.rows, -(-source.rows // rows) + 1).astype(np.int64)
    if source.starts is not None:
        starts = np.array([*source.starts, source.rows])
        bounds = np.unique(starts[np.searchsorted(starts, bounds)])
    return [int(bound) for bound in bounds]


def _clear(folder: str, target: str, sources: Sequence[str], access: RemoteAccess, *, force: bool) -> None:
    """Refuse to overwrite an index and parts, or remove old parts with `force`."""
    if is_url(folder):
        try:
            old = expand(f"{folder}/{_PATTERN}", access)
        except DataError:  # none, or the first part will show that the folder cannot be reached
            return
        if not force:
            raise UsageError(f"output: {shown(old[0])} exists already; choose another folder, or force=True (--force)")
        return
    old = glob.glob(f"{glob.escape(folder)}/{_PATTERN}")
    check_outputs([target, *old], sources, force=force)
    for path in old:
        os.unlink(path)


def _write_part(part: tuple[RowSource, str], reading: ReadOptions, writing: WriteOptions) -> Outcome:
    """Write a part in a worker, perhaps for the second time."""
    source, output = part
    with indexing.local_path(output, read_remote(writing.remote)) as path:
        return write_files(source, reading, writing, [path])
