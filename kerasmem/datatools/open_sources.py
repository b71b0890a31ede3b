"""Open paths as sources, and join them as one."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

import h5py

from kerasmem.datatools.array_source import ArraySource
from kerasmem.datatools.hdf5_source import Hdf5Source
from kerasmem.datatools.image_and_record_source import ImageFolder, RecordSource
from kerasmem.datatools.row_source import RowSource, combine
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.table_source import SUFFIXES, open_tables
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.rows.settings import natural_order

_HDF5 = (".h5", ".hdf5", ".h5ad", ".mat", ".nc", ".hdf")
_RECORDS = re.compile(r"\.tfrecords?$|\.tfrec$|\.tfrecord-\d+-of-\d+$", re.IGNORECASE)


def open_sources(paths: Sequence[str], options: ReadOptions) -> RowSource:
    """Return all sources as one.

    Args:
        paths: files and folders, as `find_paths` returns them.
        options: how they are read.

    Raises:
        DataError: If a path cannot be read, or they do not fit together.
        UsageError: If a path is of an unknown kind, or there twice.
    """
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise UsageError("sources: a file is named more than once; its rows would be written more than once")
    tables = {path: path.lower().endswith(SUFFIXES) and os.path.isfile(path) for path in paths}
    others = [_open(path, options) for path, is_table in tables.items() if not is_table]
    return combine([*others, *open_tables([path for path, is_table in tables.items() if is_table], options)])


def find_paths(sources: Sequence[str]) -> list[str]:
    """Return the paths that match paths and patterns.

    Raises:
        DataError: If no file matches a pattern.
        UsageError: If there are none.
    """
    if not sources:
        raise UsageError("sources: name at least one file or folder")
    paths = []
    for source in sources:
        path = os.path.expanduser(source)
        if glob.has_magic(path) and not os.path.lexists(path):
            matching = sorted(glob.glob(path, recursive=True), key=natural_order)
            if not matching:
                raise DataError(f"{shown(path)}: no file matches this pattern")
            paths += matching
        else:
            paths.append(path)
    return paths


def _open(path: str, options: ReadOptions) -> RowSource:
    lower = path.lower()
    if os.path.isdir(path):
        return ImageFolder(path, options)
    if not os.path.isfile(path):
        problem = "is not a file or folder" if os.path.exists(path) else "there is no such file or folder"
        raise DataError(f"{shown(path)}: {problem}")
    if lower.endswith((".npy", ".npz")):
        return ArraySource(path, options)
    if _RECORDS.search(path):
        return RecordSource(path, options)
    if h5py.is_hdf5(path) or lower.endswith(_HDF5):
        return Hdf5Source(path, options)
    kinds = ".npy, .npz, .csv, .tsv, .parquet, .arrow, .tfrecord, HDF5, or a folder with a folder of images a class"
    raise UsageError(f"{shown(path)}: of no kind that is known by its name: {kinds}")
