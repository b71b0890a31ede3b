"""Can these datasets be trained from? Opens the file, looks, and refuses with the way out."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.errors import DataError, KerasmemError
from kerasmem.hdf5.format.filters import EXTRA, is_undone_here, register_filters
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, FileLayout, one_line, shown
from kerasmem.hdf5.format.links import DAMAGED, open_dataset, points_of, shape_of, walk_objects
from kerasmem.hdf5.format.urls import is_url, redact
from kerasmem.hdf5.io.access import RemoteAccess
from kerasmem.hdf5.io.fetcher import Traffic
from kerasmem.hdf5.io.objects import ObjectInfo
from kerasmem.hdf5.io.remote_file import RemoteHdf5, open_remote, request_infos
from kerasmem.hdf5.rows.paths import Access, DataIndex

_STORAGE = {
    h5py.h5d.COMPACT: "compact",
    h5py.h5d.CONTIGUOUS: "contiguous",
    h5py.h5d.CHUNKED: "chunked",
    h5py.h5d.VIRTUAL: "virtual",
}
_STORED_APART = (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED)  # from the dataset's header
_LISTED = 12  # names shown in a message
_IN_USE = ("unable to lock", "already open for")  # in HDF5's words
GROUP = 128
"""Remote files whose first bytes are asked for at once, and stay in memory until they are looked at."""
_VISITED = 2000  # objects looked at for a message: a hostile file may hold millions


def refuse_no_file(path: str) -> None:
    """Refuse a path without a file, or with an empty one."""
    if not os.path.exists(path):
        raise DataError(f"{shown(path)}: there is no such file")
    if not os.path.isfile(path):
        raise DataError(f"{shown(path)}: this is not a file; give the path of one HDF5 file")
    if os.path.getsize(path) == 0:  # as the kernel's files are that never end
        raise DataError(f"{shown(path)}: the file is empty (0 bytes)")


def open_file(
    path: str,
    remote: RemoteAccess | None = None,
    known: ObjectInfo | None = None,
    traffic: Traffic | None = None,
    **options: Any,
) -> h5py.File:
    """Open an HDF5 file for reading. Every failure becomes one clear `DataError`.

    Args:
        path: the file, or its URL.
        remote: how URLs are reached.
        known: size and version of a remote file; by default its store is asked.
        traffic: what comes from the store is counted here.
        options: of h5py.
    """
    try:
        if is_url(path):
            return open_remote(path, remote or RemoteAccess(), known, traffic, **options)
        refuse_no_file(path)
        return h5py.File(path, "r", **options)
    except KerasmemError:
        raise
    except DAMAGED as error:
        raise DataError(f"{shown(path)}: {_why_not_open(redact(one_line(str(error))))}") from error


def _why_not_open(reason: str) -> str:
    if "truncated" in reason:
        return f"the file is truncated; copy or write it again ({reason})"
    if any(text in reason for text in _IN_USE):
        return (
            "the file is locked, most likely open for writing somewhere; close it there; where the file system has no "
            "locks set HDF5_USE_FILE_LOCKING=FALSE; after a crash of its writer run `h5clear -s "
            f"FILE` ({reason})"
        )
    if "signature" in reason:
        return "this is no HDF5 file (its signature is missing)"
    return f"HDF5 cannot open the file: {reason}"


def scan_files(paths: Sequence[str], names: list[str], access: Access) -> DataLayout:
    """Return the layout of the datasets called `names` in all files, as `scan_file` does in one.

    Args:
        paths: the files. Those of an index are not opened.
        names: full dataset paths.
        access: what may be read.
    """
    if isinstance(paths, DataIndex):
        return paths.layout(names)
    groups = (paths[start : start + GROUP] for start in range(0, len(paths), GROUP))
    return DataLayout(tuple(layout for group in groups for layout in scan_group(group, names, access)))


def scan_group(paths: Sequence[str], names: list[str], access: Access) -> list[FileLayout]:
    """Return the layout of each file. The stores of remote ones are asked together."""
    remote = [path for path in paths if is_url(path)]
    known = request_infos(remote, access.remote) if len(remote) > 1 else {}
    return [scan_file(path, names, access, known.get(path)) for path in paths]


def scan_file(path: str, names: list[str], access: Access, known: ObjectInfo | None = None) -> FileLayout:
    """Return the layout of the datasets called `names`, all of them fit to train from.

    Args:
        path: the HDF5 file.
        names: full dataset paths; a leading "/" may be left out.
        access: what may be read.
        known: size and version of a remote file, where they were asked for.

    Raises:
        DataError: If the file, or one of the datasets, cannot be used. The message says why and what to do.
    """
    file = open_file(path, access.remote, known)
    tag = None
    try:
        if isinstance(file, RemoteHdf5):
            size, tag = file.remote.known.size, file.remote.known.tag
            if tag is None:
                note = "its store names no version, so that a replaced file of the same length goes unnoticed"
                warnings.warn(f"{shown(path)}: {note}", stacklevel=2)
        else:
            size = os.path.getsize(path)
        datasets = [look_at(file, path, name, access) for name in names]
    finally:
        close_file(file)
    lengths = {layout.rows for layout in datasets}
    if len(lengths) > 1:
        listed = ", ".join(f"{shown(layout.name)} has {layout.rows:,}" for layout in datasets)
        if len({layout.shape[-1] for layout in datasets}) == 1:
            listed += "; their last axes agree, and `kerasmem data convert --rows-axis last` makes them rows"
        elif any(layout.shape == (1, max(lengths)) for layout in datasets):
            listed += "; MATLAB stores a column as one row, and `kerasmem data convert` makes it rows"
        raise DataError(f"{shown(path)}: the datasets differ in their number of rows (axis 0): {listed}")
    return FileLayout(path, size, tuple(datasets), tag)


def close_file(file: h5py.File) -> None:
    """Close a file, ignoring failures of HDF5 with a damaged one."""
    with contextlib.suppress(*DAMAGED):
        file.close()


def find_dataset(file: h5py.File, name: str, *, trust_file: bool = False) -> h5py.Dataset:
    """Return the dataset called `name`, refusing groups, missing names and, without trust, data in other files.

    What a remote file names is never followed.
    """
    where = shown(file.filename)
    try:
        item = open_dataset(file, name, trust_file=trust_file and not isinstance(file, RemoteHdf5))
    except DataError:
        raise
    except DAMAGED as error:
        raise DataError(f"{where} has no dataset {shown(name)}. {_what_exists(file)}") from error
    if isinstance(item, h5py.Group) and all(part in item for part in ("data", "indices", "indptr")):
        raise DataError(f"{where}: {shown(name)} is a sparse matrix; `kerasmem data convert` writes it dense")
    if not isinstance(item, h5py.Dataset):
        raise DataError(f"{where}: {shown(name)} is no dataset, but a group or a type. {_what_exists(file)}")
    return item


def rows_of(dataset: h5py.Dataset) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of a dataset as read. The extents of an array type come last.

    Raises:
        TypeError: If NumPy has no such type.
    """
    dtype = dataset.dtype
    shape = tuple(int(extent) for extent in dataset.shape)
    return (shape, dtype) if dtype.subdtype is None else (shape + dtype.subdtype[1], dtype.subdtype[0])


def look_at(file: h5py.File, path: str, name: str, access: Access) -> DatasetLayout:
    """Return the layout of a dataset of an open file, one that is fit to train from.

    Raises:
        DataError: If it is not. The message says why and what to do.
    """
    try:
        return _look(file, path, name, access)
    except DataError:
        raise
    except DAMAGED as error:
        raise DataError(
            f"{shown(path)}: what the file says about dataset {shown(name)} cannot be read: {one_line(str(error))}; "
            "it is damaged: copy or write the file again"
        ) from error


def _look(file: h5py.File, path: str, name: str, access: Access) -> DatasetLayout:
    dataset = find_dataset(file, name, trust_file=access.trust_file)
    here = f"{shown(path)}: dataset {shown(name)}"
    if not dataset.shape or 0 in dataset.shape:
        raise DataError(f"{here} is empty or a single value (shape {dataset.shape}); data needs rows along axis 0")
    if dataset.is_scale:
        raise DataError(f"{here} is a dimension scale, the coordinates of other datasets (netCDF); name the data")
    try:
        shape, dtype = rows_of(dataset)
    except TypeError as error:  # PyTables's Time64, for example
        raise DataError(f"{here} has a type that NumPy lacks ({one_line(str(error))}); store it as float64") from error
    _refuse_dtype(here, dtype)
    creation = dataset.id.get_create_plist()
    storage = _STORAGE.get(creation.get_layout(), "unknown")
    _refuse_filters(here, creation, access)
    missing = missing_part(file, dataset)
    if missing and not access.trust_file:
        raise DataError(
            f"{here} is not complete: {missing}. Write the rest, or pass trust_file=True to read fill values there"
        )
    if missing:
        warnings.warn(f"{here} is not complete: {missing}; fill values are read there", stacklevel=2)
    return DatasetLayout(
        name=name,
        shape=shape,
        dtype=dtype.str,
        storage=storage,
        chunks=None if dataset.chunks is None else tuple(int(extent) for extent in dataset.chunks),
        filters=tuple(_filter_name(creation, index) for index in range(creation.get_nfilters())),
        stored_bytes=int(dataset.id.get_storage_size()),
    )


def _refuse_filters(here: str, creation: Any, access: Access) -> None:
    for index in range(creation.get_nfilters()):
        code = creation.get_filter(index)[0]
        if is_undone_here(code):
            continue
        bring = "pip install 'kerasmem[codecs]', or " if code in EXTRA else ""
        stored = f"{here} is stored with the filter {shown(_filter_name(creation, index))} (HDF5 filter {code})"
        rewrite = f"{bring}rewrite the dataset with `h5repack -f GZIP=4 IN OUT` or h5py where it can be read"
        if not h5py.h5z.filter_avail(code) and not (register_filters() and h5py.h5z.filter_avail(code)):
            raise DataError(f"{stored}, which is not installed here: {rewrite}")
        if not access.trust_file:
            raise DataError(
                f"{stored}, which HDF5 would undo unchecked: a damaged chunk would end this process, or bring its "
                f"memory into the data. The ways out: {rewrite}, or pass trust_file=True"
            )


def missing_part(file: h5py.File, dataset: h5py.Dataset) -> str:
    """Describe the missing part of a dataset; "" if none is known."""
    if dataset.is_virtual:
        return _missing_sources(file, dataset)
    unwritten = dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED
    if unwritten and not dataset.external and dataset.id.get_create_plist().get_layout() in _STORED_APART:
        return f"it was declared with shape {shape_of(dataset)} and never written"
    if dataset.chunks is None:
        return ""
    expected = prod(-(-extent // chunk) for extent, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    absent = expected - dataset.id.get_num_chunks()
    return f"{absent:,} of its {expected:,} chunks were never written" if absent > 0 else ""


def _missing_sources(file: h5py.File, dataset: h5py.Dataset) -> str:
    try:
        sources = dataset.virtual_sources()
        covered = [points_of(source.vspace) for source in sources]
    except DAMAGED:
        return "its list of sources cannot be read"
    folder = os.path.dirname(os.path.realpath(file.filename))
    for path in dict.fromkeys(source.file_name for source in sources):
        if path != "." and "%" not in path and not os.path.exists(os.path.join(folder, path)):
            return f"its source {shown(path)} is missing"
    total = prod(dataset.shape)
    if all(0 <= count <= total for count in covered) and sum(covered) < total:
        return f"its sources cover {sum(covered):,} of its {total:,} values"
    return ""


def _filter_name(creation: Any, index: int) -> str:
    code, _, _, name = creation.get_filter(index)
    known = {h5py.h5z.FILTER_DEFLATE: "gzip", h5py.h5z.FILTER_SHUFFLE: "shuffle"}
    return known.get(code) or name.decode("utf-8", "replace") or f"filter {code}"


def _refuse_dtype(here: str, dtype: np.dtype[Any]) -> None:
    if h5py.check_string_dtype(dtype) is not None or dtype.kind in "SU":
        raise DataError(f"{here} holds text; encode it as numbers first")
    if h5py.check_vlen_dtype(dtype) is not None:
        raise DataError(f"{here} is ragged (rows of variable length); pad the rows to one shape and store that")
    if dtype.kind == "O":
        raise DataError(f"{here} holds objects or references, not numbers")
    if dtype.names is not None:
        fields = ", ".join(shown(field) for field in dtype.names[:_LISTED])
        raise DataError(
            f"{here} is a table with the columns {fields}; "
            "`kerasmem data convert --columns NAME=TABLE/COLUMN` writes them as datasets"
        )
    if dtype.kind not in "fiub":
        raise DataError(f"{here} holds {dtype} values; store them as integers or floats (complex ones as two channels)")


def _what_exists(file: h5py.File) -> str:
    try:
        objects, _ = walk_objects(file, _VISITED)
        shapes = {path: shape_of(item) for path, item in objects.items() if isinstance(item, h5py.Dataset)}
    except DAMAGED:
        return "Its list of datasets cannot be read"
    if not shapes:
        return "It holds no datasets at all"
    listed = "; ".join(f"{shown(path)} {shape}" for path, shape in list(shapes.items())[:_LISTED])
    more = f"; and {len(shapes) - _LISTED} more" if len(shapes) > _LISTED else ""
    return f"It holds: {listed}{more}"
