"""`kerasmem.data.index`: an index of many HDF5 files, and conversions that write parts and their index."""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.datatools.conversion_settings import ReadOptions, WriteOptions, check_outputs
from kerasmem.datatools.listing import list_contents
from kerasmem.datatools.reports import DataIndexed, Progress
from kerasmem.datatools.row_source import RowSource
from kerasmem.datatools.writing import Outcome, WritePlan, write_files
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import DataLayout, FileLayout, plain_name, shown
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.access import RemoteAccess, read_remote
from kerasmem.hdf5.io.remote_file import expand, put_file, refuse_web
from kerasmem.hdf5.rows.paths import INDEX_SUFFIX, Access, read_paths, read_place, write_index
from kerasmem.hdf5.rows.scan import GROUP, scan_group
from kerasmem.processes.executors import run_tasks

_PATTERN = f"part-{'[0-9]' * 5}.h5"


def index(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    datasets: Sequence[str] | None = None,
    remote: Mapping[str, Any] | None = None,
    trust_file: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> DataIndexed:
    """Write an index of HDF5 files that are read as one: `H5ChunkSequence("train.index")` then opens none of them.

    The index has of each file its rows, the storage of its datasets, and its size and version (an ETag, or its time of
    change). A worker opens only files whose rows it delivers, and no file to find out what is in it. A file
    that was changed after the index was made is an error that names it.

    Args:
        paths: the files as for `H5ChunkSequence`: a list, a pattern, or URLs.
        output: the index to write, a path or URL that ends with ".index". Files beside and below a path are named
            relative to it, so that both can be moved together.
        datasets: their names; by default all that have as many rows as the largest one of the first file.
        remote: for URLs, as for `H5ChunkSequence`.
        trust_file: as for `H5ChunkSequence`.
        executor: as for `kerasmem.data.convert`. Its workers must see the files under the same names.
        progress: called with the step, the files done and all files.

    Returns:
        What was indexed.

    Raises:
        DataError: a file cannot be read, or differs from the first in names, shapes or types.
        UsageError: a setting is wrong.

    Examples:
        >>> import h5py, numpy as np
        >>> for number in range(3):
        ...     with h5py.File(f"/tmp/indexed-{number}.h5", "w") as f:
        ...         f["x"], f["y"] = np.zeros((100, 8)), np.arange(100)
        >>> from kerasmem import H5ChunkSequence
        >>> index("/tmp/indexed-*.h5", "/tmp/indexed.index").files
        3
        >>> H5ChunkSequence("/tmp/indexed.index").num_rows
        300
    """
    target = read_place(output)
    if not target.endswith(INDEX_SUFFIX):
        raise UsageError(f"output: {shown(target)} does not end with {INDEX_SUFFIX!r}, by which an index is known")
    access = Access(checks.flag("trust_file", trust_file), read_remote(remote))
    names = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files = read_paths(names[0] if len(names) == 1 else names, access.remote)
    wanted = [plain_name(name) for name in datasets] if datasets else _choose(files[0], access)
    try:
        with _local_path(target, access.remote) as path:
            look = functools.partial(_scan_group, names=wanted, access=access)
            groups = (files[start : start + GROUP] for start in range(0, len(files), GROUP))
            layouts: list[FileLayout] = []
            for group in run_tasks(executor, look, groups):
                layouts += group
                DataLayout((layouts[0], *group))  # refuses files that differ
                if progress is not None:
                    progress("indexing", len(layouts), len(files))
            write_index(path, layouts)
            size = os.path.getsize(path)
    except OSError as error:
        raise DataError(f"{shown(target)}: the index cannot be written: {error.strerror or error}") from error
    rows = sum(file.datasets[0].rows for file in layouts)
    stored = sum(dataset.stored_bytes for file in layouts for dataset in file.datasets)
    return DataIndexed(target, len(files), rows, tuple(wanted), stored, size)


@contextlib.contextmanager
def _local_path(target: str, remote: RemoteAccess) -> Iterator[str]:
    """Yield the path of a file to write, and upload the file if the target is a URL."""
    if not is_url(target):
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        path = os.path.join(folder, "file")
        yield path
        put_file(path, target, remote)


def _choose(path: str, access: Access) -> list[str]:
    """Return the datasets of a file that can be trained from and have as many rows as the largest one."""
    contents = list_contents(path, access)
    layouts = [entry.layout for entry in contents.entries if entry.layout is not None]
    if not layouts:
        contents.refuse_unusable()
    largest = max(layouts, key=lambda layout: layout.rows * layout.row_bytes)
    return [entry.name for entry in contents.with_rows_of(largest.name)]


def _scan_group(files: Sequence[str], names: list[str], access: Access) -> list[FileLayout]:
    """Return the layouts of some files, with the time of change of local ones."""
    times = [0 if is_url(path) or not os.path.exists(path) else os.stat(path).st_mtime_ns for path in files]
    return [replace(file, time=time) for file, time in zip(scan_group(files, names, access), times, strict=True)]


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
    written = index(outputs, target, datasets=names, remote=writing.remote, executor=executor, progress=progress)
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
    with _local_path(output, read_remote(writing.remote)) as path:
        return write_files(source, reading, writing, [path])
