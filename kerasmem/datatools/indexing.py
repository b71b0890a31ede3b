"""`kerasmem.data.index`: write one file with the rows and chunk places of many HDF5 files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import h5py
import numpy as np

from kerasmem import checks
from kerasmem.datatools.reports import DataIndexed, Progress
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.chunks import CHUNK
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, FileLayout, plain_name, shown
from kerasmem.hdf5.format.links import walk_objects
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.access import RemoteAccess, read_remote
from kerasmem.hdf5.io.fetcher import RangeFetcher
from kerasmem.hdf5.io.remote_file import ask_for_info, put_file
from kerasmem.hdf5.rows.index import IndexWriter, StoredAs, Table
from kerasmem.hdf5.rows.opened import OpenFile
from kerasmem.hdf5.rows.scan import GROUP, close_file, look_at, open_file, scan_file
from kerasmem.hdf5.rows.settings import INDEX_SUFFIX, Access, read_paths, read_place
from kerasmem.hdf5.rows.sources import ChunkedSource, ContiguousSource, Source
from kerasmem.processes.executors import run_tasks

_LOOKED_AT = 2000  # objects of the first file


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

    The index has of each file its rows, its size and version (an ETag, or its time of change), and where the chunks of
    each dataset lie. A worker opens only files whose rows it delivers, and no file to find out what is in it. A file
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
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files = read_paths(given[0] if len(given) == 1 else given, access.remote)
    wanted = [plain_name(name) for name in datasets] if datasets else _choose(files[0], access)
    try:
        with local_path(target, access.remote) as path:
            look = functools.partial(_look_into_group, names=wanted, access=access)
            groups = (files[start : start + GROUP] for start in range(0, len(files), GROUP))
            found: Iterator[_Found] = itertools.chain.from_iterable(run_tasks(executor, look, groups))
            rows, stored, hidden = _write(path, found, wanted, len(files), progress)
            size = os.path.getsize(path)
    except OSError as error:
        raise DataError(f"{shown(target)}: the index cannot be written: {error.strerror or error}") from error
    notes = [
        f"{shown(name)} is stored so that HDF5 itself has to look where it lies; its files are opened for it"
        for name in sorted(hidden)
    ]
    return DataIndexed(target, len(files), rows, tuple(wanted), stored, size, tuple(notes))


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


_Found = tuple[FileLayout, int, list[Table]]
"""A file, its time of change, and the places of its datasets."""


def _write(
    path: str, found: Iterable[_Found], names: list[str], files: int, progress: Progress | None
) -> tuple[int, int, set[str]]:
    """Write an index and return the rows, the stored bytes and the datasets that only HDF5 finds."""
    writer: IndexWriter | None = None
    first: FileLayout | None = None
    hidden: set[str] = set()
    rows = stored = 0
    for done, (layout, time, tables) in enumerate(found):
        first = first or layout
        DataLayout((first, layout))  # refuses one that differs
        writer = writer or IndexWriter(path, layout.datasets)
        writer.add(layout, time, tables)
        hidden |= {name for name, table in zip(names, tables, strict=True) if not table.kind.direct}
        rows += layout.datasets[0].rows
        stored += sum(each.stored_bytes for each in layout.datasets)
        if progress is not None:
            progress("indexing", done + 1, files)
    assert writer is not None
    writer.write()
    return rows, stored, hidden


def _choose(path: str, access: Access) -> list[str]:
    """Return the datasets of a file that can be trained from and have as many rows as the largest one."""
    file = open_file(path, access.remote)
    try:
        objects, _ = walk_objects(file, _LOOKED_AT)
        found, problem = [], None
        for name, item in objects.items():
            if isinstance(item, h5py.Dataset):
                try:
                    found.append(look_at(file, path, name, access))
                except DataError as error:
                    problem = error
    finally:
        close_file(file)
    if not found:
        raise problem or DataError(f"{shown(path)}: holds no datasets")
    largest = max(found, key=lambda layout: layout.rows * layout.row_bytes)
    return [layout.name for layout in found if layout.rows == largest.rows]


def _look_into_group(files: Sequence[str], names: list[str], access: Access) -> list[_Found]:
    """Look into some files."""
    known = ask_for_info([path for path in files if is_url(path)], access.remote)
    with contextlib.ExitStack() as opened:

        @functools.cache
        def fetcher() -> RangeFetcher:
            return opened.enter_context(contextlib.closing(RangeFetcher(access.remote)))

        layouts = (scan_file(path, names, access, known.get(path)) for path in files)
        return [(layout, *_look_into(layout, access, fetcher)) for layout in layouts]


def _look_into(layout: FileLayout, access: Access, fetcher: Callable[[], RangeFetcher]) -> tuple[int, list[Table]]:
    """Return a file's time of change and the places of its datasets."""
    file = OpenFile(layout, access, None, fetcher if is_url(layout.path) else None)
    file.open()
    try:
        tables = [_table(dataset, file.source(dataset.name)) for dataset in layout.datasets]
        file.check()
        return file.time, tables
    finally:
        file.rest()


_NONE = np.zeros(0, CHUNK)


def _table(layout: DatasetLayout, source: Source) -> Table:
    kind = StoredAs(layout.storage, layout.chunks, layout.filters)
    if isinstance(source, ContiguousSource):
        return Table(kind, source.offset, _NONE)
    if not isinstance(source, ChunkedSource) or not source.index.is_complete:
        return Table(replace(kind, direct=False), -1, _NONE)
    pipeline = tuple((int(code), tuple(map(int, numbers))) for code, numbers in source.pipeline.filters)
    kind = replace(kind, pipeline=pipeline)
    return Table(kind, -1, source.index.places)
