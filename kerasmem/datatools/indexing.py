"""`kerasmem.data.index`: indexes of many HDF5 files, and conversions that write parts and an index."""

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
from kerasmem.datatools.reports import IndexSummary, Progress
from kerasmem.datatools.row_source import RowSource
from kerasmem.datatools.writing import WriteOutcome, WritePlan, write_files
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import DataLayout, FileLayout, plain_name, quote
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.access import RemoteAccess, read_remote
from kerasmem.hdf5.io.remote_file import expand, put_file, refuse_web
from kerasmem.hdf5.rows.paths import INDEX_SUFFIX, Access, read_location, read_paths, write_index
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
) -> IndexSummary:
    """Write an index of many HDF5 files, so that `H5ChunkSequence("train.index")` need not open them to start.

    The index holds the rows of each file, the storage layout of its datasets, and its size and version (an ETag or
    modification time). A worker opens only the files that it reads. If a file changes after the index was written,
    reading it is an error that names the file.

    Args:
        paths: the files as for `H5ChunkSequence`: a list, a pattern, or URLs.
        output: the index to write, a path or URL that ends with ".index". Paths in its folder are stored relative to
            it, so that files and index can be moved together.
        datasets: names of datasets. Defaults to all with as many rows as the largest one of the first file.
        remote: options for URLs, as for `H5ChunkSequence`.
        trust_file: as for `H5ChunkSequence`. Defaults to False.
        executor: as for `kerasmem.data.convert`. Its workers must see the files under the same names.
        progress: called with the step, the number of files done and the number of all files.

    Returns:
        An `IndexSummary`: the numbers of files and rows, the names of the datasets, and sizes in bytes.

    Raises:
        DataError: If a file cannot be read, or differs from the first in names, shapes or types.
        UsageError: If a setting is wrong.

    Examples:
        >>> import h5py, kerasmem, numpy as np
        >>> for number in range(3):
        ...     with h5py.File(f"/tmp/indexed-{number}.h5", "w") as f:
        ...         f["x"], f["y"] = np.zeros((100, 8)), np.arange(100)
        >>> kerasmem.data.index("/tmp/indexed-*.h5", "/tmp/indexed.index").files
        3
        >>> kerasmem.H5ChunkSequence("/tmp/indexed.index").num_rows
        300
    """
    target = read_location(output)
    if not target.endswith(INDEX_SUFFIX):
        raise UsageError(f"output must end with {INDEX_SUFFIX!r}; got {quote(target)}")
    access = Access(checks.flag("trust_file", trust_file), read_remote(remote))
    names = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files = read_paths(names[0] if len(names) == 1 else names, access.remote)
    dataset_names = [plain_name(name) for name in datasets] if datasets else _choose_datasets(files[0], access)
    try:
        with _local_path(target, access.remote) as path:
            scan = functools.partial(_scan_group, names=dataset_names, access=access)
            groups = (files[start : start + GROUP] for start in range(0, len(files), GROUP))
            layouts: list[FileLayout] = []
            for group in run_tasks(executor, scan, groups):
                layouts += group
                DataLayout((layouts[0], *group))  # refuses files that differ
                if progress is not None:
                    progress("indexing", len(layouts), len(files))
            write_index(path, layouts)
            size = os.path.getsize(path)
    except OSError as error:
        raise DataError(f"{quote(target)}: the index cannot be written: {error.strerror or error}") from error
    rows = sum(file.datasets[0].rows for file in layouts)
    stored = sum(dataset.stored_bytes for file in layouts for dataset in file.datasets)
    return IndexSummary(target, len(files), rows, tuple(dataset_names), stored, size)


@contextlib.contextmanager
def _local_path(target: str, remote: RemoteAccess) -> Iterator[str]:
    """Yield a local path to write to. If the target is a URL, upload the file afterwards."""
    if not is_url(target):
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        path = os.path.join(folder, "file")
        yield path
        put_file(path, target, remote)


def _choose_datasets(path: str, access: Access) -> list[str]:
    """Return the names of a file's usable datasets with as many rows as the largest one."""
    contents = list_contents(path, access)
    layouts = [entry.layout for entry in contents.entries if entry.layout is not None]
    if not layouts:
        contents.refuse_unusable()
    largest = max(layouts, key=lambda layout: layout.rows * layout.row_bytes)
    return [entry.name for entry in contents.with_rows_of(largest.name)]


def _scan_group(files: Sequence[str], names: list[str], access: Access) -> list[FileLayout]:
    """Return the layouts of some files, with the modification times of local ones."""
    times = [0 if is_url(path) or not os.path.exists(path) else os.stat(path).st_mtime_ns for path in files]
    return [replace(file, time=time) for file, time in zip(scan_group(files, names, access), times, strict=True)]


def read_index(output: Any, writing: WriteOptions) -> str:
    """Return the path or URL of the index to write.

    Raises:
        UsageError: If it is not that of an index, or the settings need all rows in one file.
    """
    if writing.shuffle:
        raise UsageError(
            "output must end with .h5 if shuffle or split is set, because parts of an index cannot be shuffled. If you "
            "want parts, leave both out: H5ChunkSequence shuffles as it reads, and its rows= selects rows"
        )
    target = read_location(output)
    if not target.endswith(INDEX_SUFFIX):
        name = f"parts/train{INDEX_SUFFIX}"
        raise UsageError(f"output must be an index, such as {name}, if an executor writes parts; got {quote(target)}")
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
) -> WriteOutcome:
    """Write a source's rows to parts, and their index.

    Args:
        source: the source.
        plan: plan of a conversion to one file.
        reading: options for reading.
        writing: options for writing.
        target: path or URL of the index. The parts are written to its folder.
        part_bytes: size of the rows in a part.
        executor: writes the parts. None for this process.
        progress: called with the step, the number of rows done and the number of all rows.
        force: overwrite an index and parts if they exist.
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
    return WriteOutcome(size + written.index_bytes, losses)


def part_bounds(source: RowSource, rows: int) -> list[int]:
    """Return the first row of each part, and the number of all rows.

    Parts have similar sizes of at most `rows` rows. If the source can only be read from some rows on, parts begin there
    and may be larger.
    """
    bounds = np.linspace(0, source.rows, -(-source.rows // rows) + 1).astype(np.int64)
    if source.starts is not None:
        starts = np.array([*source.starts, source.rows])
        bounds = np.unique(starts[np.searchsorted(starts, bounds)])
    return [int(bound) for bound in bounds]


def _clear(folder: str, target: str, sources: Sequence[str], access: RemoteAccess, *, force: bool) -> None:
    """Remove old parts with `force`. Without it, raise `UsageError` if there are any."""
    if is_url(folder):
        try:
            old = expand(f"{folder}/{_PATTERN}", access)
        except DataError:  # there are none, or writing the first part will fail with a better message
            return
        if not force:
            raise UsageError(f"output: {quote(old[0])} exists already; to replace it, pass force=True (--force)")
        return
    old = glob.glob(f"{glob.escape(folder)}/{_PATTERN}")
    check_outputs([target, *old], sources, force=force)
    for path in old:
        os.unlink(path)


def _write_part(part: tuple[RowSource, str], reading: ReadOptions, writing: WriteOptions) -> WriteOutcome:
    """Write one part. An executor may run this twice."""
    source, output = part
    with _local_path(output, read_remote(writing.remote)) as path:
        return write_files(source, reading, writing, [path])
