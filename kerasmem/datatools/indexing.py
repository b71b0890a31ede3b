"""`kerasmem.data.index`: write one file with the layouts of many HDF5 files."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from kerasmem import checks
from kerasmem.datatools.listing import list_contents
from kerasmem.datatools.reports import DataIndexed, Progress
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import DataLayout, FileLayout, plain_name, shown
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.access import RemoteAccess, read_remote
from kerasmem.hdf5.io.remote_file import put_file
from kerasmem.hdf5.rows.index import write_index
from kerasmem.hdf5.rows.scan import GROUP, scan_group
from kerasmem.hdf5.rows.settings import INDEX_SUFFIX, Access, read_paths, read_place
from kerasmem.processes.executors import run_tasks


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
        with local_path(target, access.remote) as path:
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
def local_path(target: str, remote: RemoteAccess) -> Iterator[str]:
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
