"""Open paths as sources, and join them as one."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

import h5py

from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.arrays import ArraySource
from kerasmem.datatools.sources.hdf5 import Hdf5Source
from kerasmem.datatools.sources.images import ImageFolder
from kerasmem.datatools.sources.records import RecordSource
from kerasmem.datatools.sources.rows import RowSource, combine
from kerasmem.datatools.sources.tables import SUFFIXES, open_tables
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.rows.settings import natural_order

_HDF5 = (".h5", ".hdf5", ".h5ad", ".mat", ".nc", ".hdf")
_RECORDS = re.compile(r"\.tfrecords?(\.gz)?$|\.tfrec$|\.tfrecord-\d+-of-\d+$", re.IGNORECASE)
_NAMED = re.compile(r"([A-Za-z_][\w./-]*)=(.+)", re.DOTALL)


def open_sources(paths: Sequence[tuple[str | None, str]], options: ReadOptions) -> RowSource:
    """Return all sources as one.

    Args:
        paths: what `find_paths` found.
        options: how they are read.

    Raises:
        DataError: one cannot be read, or they do not fit together.
        UsageError: one is of no known kind.
    """
    opened: list[RowSource] = []
    tables: list[str] = []
    seen: set[str] = set()
    for name, path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise UsageError(f"{shown(path)}: is named more than once; its rows would come more than once")
        seen.add(real)
        if os.path.isdir(path):
            opened.append(ImageFolder(path, options))
            continue
        _check_file(path)
        if path.lower().endswith(SUFFIXES):
            tables.append(path)
        else:
            opened.append(_open(path, name, options))
    if tables:
        opened += open_tables(tables, options)
    return combine(opened)


def find_paths(sources: Sequence[str]) -> list[tuple[str | None, str]]:
    """Return the paths that sources stand for, each with the name given to it.

    Args:
        sources: paths, patterns, folders, and for .npy also NAME=PATH.

    Raises:
        DataError: no file matches a pattern.
        UsageError: there are none, or one is no path.
    """
    if not sources:
        raise UsageError("sources: name at least one file or folder")
    found: list[tuple[str | None, str]] = []
    for source in sources:
        name, path = None, os.path.expanduser(source)
        named = _NAMED.fullmatch(source)
        if named is not None and not os.path.lexists(path):
            name, path = named[1], os.path.expanduser(named[2])
        if not path or "\0" in path:
            raise UsageError(f"sources: {path!r} is no path")
        if glob.has_magic(path) and not os.path.lexists(path):
            matching = sorted(glob.glob(path, recursive=True), key=natural_order)
            if not matching:
                raise DataError(f"{shown(path)}: no file matches this pattern")
            found += [(name, one) for one in matching]
        else:
            found.append((name, path))
    return found


def _open(path: str, name: str | None, options: ReadOptions) -> RowSource:
    lower = path.lower()
    if lower.endswith((".npy", ".npz")):
        return ArraySource(path, name, options)
    if _RECORDS.search(path):
        return RecordSource(path, options)
    if h5py.is_hdf5(path) or lower.endswith(_HDF5):
        return Hdf5Source(path, options)
    kinds = ".npy, .npz, .csv, .tsv, .parquet, .arrow, .tfrecord, HDF5, or a folder with a folder of images a class"
    raise UsageError(f"{shown(path)}: of no kind that is known by its name: {kinds}")


def _check_file(path: str) -> None:
    if not os.path.exists(path):
        raise DataError(f"{shown(path)}: there is no such file or folder")
    if not os.path.isfile(path):
        raise DataError(f"{shown(path)}: is no regular file")
    with open(path, "rb"):  # raises where it may not be read
        pass
