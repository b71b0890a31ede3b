"""Open files and scan datasets. Datasets that cannot be trained from are refused with a fix."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.errors import DataError, KerasmemError, warn_user
from kerasmem.hdf5.format.filters import EXTRA, is_undone_here, register_filters
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, FileLayout, one_line, quote
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
_LISTED = 12  # names shown in a message
_IN_USE = ("unable to lock", "already open for")  # in HDF5's messages
GROUP = 128
"""Number of remote files whose first bytes are requested together and kept until they are scanned."""
_VISITED = 2000  # objects visited for a message; a hostile file may hold millions


def refuse_no_file(path: str) -> None:
    """Refuse a path if it is not a file, or the file is empty."""
    if not os.path.exists(path):
        raise DataError(f"{quote(path)}: the file does not exist; check the path")
    if not os.path.isfile(path):
        raise DataError(f"{quote(path)}: this is not a file; pass the path of an HDF5 file")
    if os.path.getsize(path) == 0:  # also endless files of the kernel
        raise DataError(f"{quote(path)}: the file is empty (0 bytes)")


def open_file(
    path: str,
    remote: RemoteAccess | None = None,
    known: ObjectInfo | None = None,
    traffic: Traffic | None = None,
    **options: Any,
) -> h5py.File:
    """Open an HDF5 file for reading.

    Args:
        path: path or URL.
        remote: settings for remote files.
        known: size and version of a remote file. Requested by default.
        traffic: counter of bytes received from the store. Defaults to a new one.
        **options: options of `h5py.File`.

    Raises:
        DataError: If it cannot be opened.
    """
    try:
        if is_url(path):
            return open_remote(path, remote or RemoteAccess(), known, traffic, **options)
        refuse_no_file(path)
        return h5py.File(path, "r", **options)
    except KerasmemError:
        raise
    except DAMAGED as error:
        raise DataError(f"{quote(path)}: {_explain_failure(redact(one_line(str(error))))}") from error


def _explain_failure(reason: str) -> str:
    if "truncated" in reason:
        return f"the file is truncated; copy or write it again ({reason})"
    if any(text in reason for text in _IN_USE):
        return (
            "the file is locked, most likely because a program is writing to it; close it there. If the file system "
            "does not support locks, set HDF5_USE_FILE_LOCKING=FALSE; if the writer crashed, run `h5clear -s FILE` "
            f"({reason})"
        )
    if "signature" in reason:
        return "this is not an HDF5 file (its signature is missing)"
    return f"HDF5 cannot open the file: {reason}"


def scan_files(paths: Sequence[str], names: list[str], access: Access) -> DataLayout:
    """Return the layout of datasets in all files.

    Args:
        paths: paths and URLs. The files of an index are not opened.
        names: full paths of the datasets.
        access: access settings.

    Raises:
        DataError: If a file or dataset cannot be used.
    """
    if isinstance(paths, DataIndex):
        return paths.layout(names)
    groups = (paths[start : start + GROUP] for start in range(0, len(paths), GROUP))
    return DataLayout(tuple(layout for group in groups for layout in scan_group(group, names, access)))


def scan_group(paths: Sequence[str], names: list[str], access: Access) -> list[FileLayout]:
    """Return the layout of each file. Remote files are requested concurrently."""
    remote = [path for path in paths if is_url(path)]
    known = request_infos(remote, access.remote) if len(remote) > 1 else {}
    return [scan_file(path, names, access, known.get(path)) for path in paths]


def scan_file(path: str, names: list[str], access: Access, known: ObjectInfo | None = None) -> FileLayout:
    """Return the layout of datasets in one file.

    Args:
        path: path or URL.
        names: full paths of the datasets; a leading "/" is optional.
        access: access settings.
        known: size and version of a remote file. Requested by default.

    Raises:
        DataError: If the file or a dataset cannot be used. The message names the reason and a fix.
    """
    file = open_file(path, access.remote, known)
    tag = None
    try:
        if isinstance(file, RemoteHdf5):
            size, tag = file.remote.known.size, file.remote.known.tag
            if tag is None:
                note = "its store reports no version, so a file replaced by another of the same size is not detected"
                warn_user(f"{quote(path)}: {note}")
        else:
            size = os.path.getsize(path)
        datasets = [scan_dataset(file, path, name, access) for name in names]
    finally:
        close_file(file)
    lengths = {layout.rows for layout in datasets}
    if len(lengths) > 1:
        listed = ", ".join(f"{quote(layout.name)} has {layout.rows:,}" for layout in datasets)
        if len({layout.shape[-1] for layout in datasets}) == 1:
            listed += "; their last axes agree, and `kerasmem data convert --rows-axis last` makes them rows"
        elif any(layout.shape == (1, max(lengths)) for layout in datasets):
            listed += "; MATLAB stores a column as one row, and `kerasmem data convert` makes it rows"
        raise DataError(f"{quote(path)}: the datasets differ in their number of rows (axis 0): {listed}")
    return FileLayout(path, size, tuple(datasets), tag)


def close_file(file: h5py.File) -> None:
    """Close a file. Failures of HDF5 with damaged files are ignored."""
    with contextlib.suppress(*DAMAGED):
        file.close()


def find_dataset(file: h5py.File, name: str, *, trust_file: bool = False) -> h5py.Dataset:
    """Open a dataset. Links to other files are followed only in trusted local files.

    Raises:
        DataError: If the name is missing, a group or a type, or leads to another file.
    """
    label = quote(file.filename)
    try:
        item = open_dataset(file, name, trust_file=trust_file and not isinstance(file, RemoteHdf5))
    except DataError:
        raise
    except DAMAGED as error:
        raise DataError(f"{label} has no dataset {quote(name)}. {_list_datasets(file)}") from error
    if isinstance(item, h5py.Group) and all(part in item for part in ("data", "indices", "indptr")):
        raise DataError(f"{label}: {quote(name)} is a sparse matrix; `kerasmem data convert` writes it dense")
    if not isinstance(item, h5py.Dataset):
        raise DataError(f"{label}: {quote(name)} is a group or a type, not a dataset. {_list_datasets(file)}")
    return item


def rows_of(dataset: h5py.Dataset) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a dataset as read. The extents of an array type are appended to the shape.

    Raises:
        TypeError: If NumPy lacks the type.
    """
    dtype = dataset.dtype
    shape = tuple(int(extent) for extent in dataset.shape)
    return (shape, dtype) if dtype.subdtype is None else (shape + dtype.subdtype[1], dtype.subdtype[0])


def scan_dataset(file: h5py.File, path: str, name: str, access: Access) -> DatasetLayout:
    """Return the layout of a dataset in an open file.

    Raises:
        DataError: If it cannot be trained from. The message names the reason and a fix.
    """
    try:
        return _scan_undamaged(file, path, name, access)
    except DataError:
        raise
    except DAMAGED as error:
        raise DataError(
            f"{quote(path)}: the metadata of dataset {quote(name)} cannot be read: {one_line(str(error))}; "
            "the file is damaged: copy or write it again"
        ) from error


def _scan_undamaged(file: h5py.File, path: str, name: str, access: Access) -> DatasetLayout:
    dataset = find_dataset(file, name, trust_file=access.trust_file)
    label = f"{quote(path)}: dataset {quote(name)}"
    if not dataset.shape or 0 in dataset.shape:
        raise DataError(f"{label} is empty or a single value (shape {dataset.shape}); data needs rows along axis 0")
    if dataset.is_scale:
        raise DataError(f"{label} is a dimension scale, the coordinates of other datasets (netCDF); name the data")
    try:
        shape, dtype = rows_of(dataset)
    except TypeError as error:  # such as Time64 of PyTables
        raise DataError(f"{label} has a type that NumPy lacks ({one_line(str(error))}); store it as float64") from error
    _refuse_dtype(label, dtype)
    creation = dataset.id.get_create_plist()
    storage = _STORAGE.get(creation.get_layout(), "unknown")
    _refuse_filters(label, creation, access)
    missing = missing_part(file, dataset)
    if missing and not access.trust_file:
        raise DataError(
            f"{label} is not complete: {missing}. Write the rest, "
            "or pass trust_file=True if fill values may be read there"
        )
    if missing:
        warn_user(f"{label} is not complete: {missing}; fill values are read there")
    return DatasetLayout(
        name=name,
        shape=shape,
        dtype=dtype.str,
        storage=storage,
        chunks=None if dataset.chunks is None else tuple(int(extent) for extent in dataset.chunks),
        filters=tuple(_filter_name(creation, index) for index in range(creation.get_nfilters())),
        stored_bytes=int(dataset.id.get_storage_size()),
    )


def _refuse_filters(label: str, creation: Any, access: Access) -> None:
    for index in range(creation.get_nfilters()):
        code = creation.get_filter(index)[0]
        if is_undone_here(code):
            continue
        install = "pip install 'kerasmem[codecs]', or " if code in EXTRA else ""
        problem = f"{label} is stored with the filter {quote(_filter_name(creation, index))} (HDF5 filter {code})"
        fix = f"{install}rewrite the dataset with `h5repack -f GZIP=4 IN OUT` or h5py on a machine that can read it"
        if not h5py.h5z.filter_avail(code) and not (register_filters() and h5py.h5z.filter_avail(code)):
            raise DataError(f"{problem}, which is not installed: {fix}")
        if not access.trust_file:
            raise DataError(
                f"{problem}, which HDF5 would decode unchecked: a damaged chunk could crash this process or leak its "
                f"memory. If you trust the file, pass trust_file=True; otherwise {fix}"
            )


def missing_part(file: h5py.File, dataset: h5py.Dataset) -> str:
    """Describe the missing part of a dataset, or return "" if none is known."""
    if dataset.is_virtual:
        return _missing_sources(file, dataset)
    unwritten = f"it was declared with shape {shape_of(dataset)} and never written"
    if dataset.chunks is None:
        is_contiguous = dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and not dataset.external
        is_unwritten = dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED
        return unwritten if is_contiguous and is_unwritten else ""
    expected = prod(-(-extent // chunk) for extent, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    absent = expected - dataset.id.get_num_chunks()  # HDF5 walks the whole index
    if absent == expected > 0:
        return unwritten
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
            return f"its source {quote(path)} is missing"
    total = prod(dataset.shape)
    if all(0 <= count <= total for count in covered) and sum(covered) < total:
        return f"its sources cover {sum(covered):,} of its {total:,} values"
    return ""


def _filter_name(creation: Any, index: int) -> str:
    code, _, _, name = creation.get_filter(index)
    known = {h5py.h5z.FILTER_DEFLATE: "gzip", h5py.h5z.FILTER_SHUFFLE: "shuffle"}
    return known.get(code) or name.decode("utf-8", "replace") or f"filter {code}"


def _refuse_dtype(label: str, dtype: np.dtype[Any]) -> None:
    if h5py.check_string_dtype(dtype) is not None or dtype.kind in "SU":
        raise DataError(f"{label} holds text; encode it as numbers first")
    if h5py.check_vlen_dtype(dtype) is not None:
        raise DataError(f"{label} is ragged (rows of variable length); pad the rows to one shape and store that")
    if dtype.kind == "O":
        raise DataError(f"{label} holds objects or references, not numbers")
    if dtype.names is not None:
        fields = ", ".join(quote(field) for field in dtype.names[:_LISTED])
        raise DataError(
            f"{label} is a table with the columns {fields}; "
            "`kerasmem data convert --columns NAME=TABLE/COLUMN` writes them as datasets"
        )
    if dtype.kind not in "fiub":
        raise DataError(f"{label} holds {dtype} values; store integers or floats (complex values as two channels)")


def _list_datasets(file: h5py.File) -> str:
    try:
        objects, _ = walk_objects(file, _VISITED)
        shapes = {path: shape_of(item) for path, item in objects.items() if isinstance(item, h5py.Dataset)}
    except DAMAGED:
        return "Its list of datasets cannot be read"
    if not shapes:
        return "It holds no datasets at all"
    listed = "; ".join(f"{quote(path)} {shape}" for path, shape in list(shapes.items())[:_LISTED])
    more = f"; and {len(shapes) - _LISTED} more" if len(shapes) > _LISTED else ""
    return f"It holds: {listed}{more}"
