"""Can these datasets be trained from? Opens the file, looks, and refuses with the way out."""

from __future__ import annotations

import difflib
import os
from typing import Any

import h5py
import numpy as np

from kerasmem.errors import DataError
from kerasmem.streaming.layout import DatasetLayout, FileLayout, shown

_STORAGE = {
    h5py.h5d.COMPACT: "compact",
    h5py.h5d.CONTIGUOUS: "contiguous",
    h5py.h5d.CHUNKED: "chunked",
    h5py.h5d.VIRTUAL: "virtual",
}
_LISTED = 12  # names shown in a message
_VISITED = 2000  # objects looked at for a message: a hostile file may hold millions
_LINKS = 16  # soft links followed for one name


def open_file(path: str, **options: Any) -> h5py.File:
    """Open an HDF5 file for reading; whatever is wrong becomes one clear `DataError`."""
    if not os.path.exists(path):
        raise DataError(f"{shown(path)}: there is no such file")
    if not os.path.isfile(path):
        raise DataError(f"{shown(path)}: this is not a file; give the path of one HDF5 file")
    try:
        return h5py.File(path, "r", **options)
    except PermissionError:
        raise DataError(f"{shown(path)}: no permission to read it") from None
    except OSError as error:
        reason = " ".join(str(error).split())
        size = os.path.getsize(path)
        if "truncated" in reason:
            raise DataError(
                f"{shown(path)}: the file is truncated: it has {size:,} bytes, and its header speaks of more "
                f"({reason}); copy or write it again"
            ) from error
        if "lock" in reason:
            raise DataError(
                f"{shown(path)}: the file is locked, most likely open for writing somewhere; close it there, "
                f"or set HDF5_USE_FILE_LOCKING=FALSE where the file system has no locks ({reason})"
            ) from error
        if size == 0:
            raise DataError(f"{shown(path)}: the file is empty (0 bytes)") from error
        if not h5py.is_hdf5(path):
            raise DataError(f"{shown(path)}: this is no HDF5 file (its signature is missing)") from error
        raise DataError(f"{shown(path)}: HDF5 cannot open the file: {reason}") from error


def scan_file(path: str, names: list[str], *, allow_external: bool = False) -> FileLayout:
    """Return the layout of the datasets called `names`, all of them fit to train from.

    Args:
        path: the HDF5 file.
        names: full dataset paths; a leading "/" may be left out.
        allow_external: follow external links, external storage and virtual datasets, that is: read other
            files which this one names.

    Raises:
        DataError: the file, or one of the datasets, cannot be used. The message says why and what to do.
    """
    with open_file(path) as file:
        size = os.path.getsize(path)
        datasets = [_look(file, path, name, allow_external) for name in names]
    lengths = {layout.rows for layout in datasets}
    if len(lengths) > 1:
        listed = ", ".join(f"{shown(layout.name)} has {layout.rows:,}" for layout in datasets)
        raise DataError(f"{shown(path)}: the datasets differ in their number of rows (axis 0): {listed}")
    return FileLayout(path, size, tuple(datasets))


def find_dataset(file: h5py.File, name: str, *, allow_external: bool = False) -> h5py.Dataset:
    """Return the dataset called `name`, refusing groups, missing names and links out of the file."""
    where = shown(file.filename)
    if not allow_external:
        _refuse_external_links(file, name)
    try:
        found = file[name]
    except (KeyError, ValueError, OSError, RuntimeError) as error:
        raise DataError(f"{where} has no dataset {shown(name)}. {_what_exists(file, name)}") from error
    if isinstance(found, h5py.Group):
        raise DataError(f"{where}: {shown(name)} is a group, not a dataset. {_what_exists(file, name)}")
    if not isinstance(found, h5py.Dataset):
        raise DataError(f"{where}: {shown(name)} is a named type, not a dataset. {_what_exists(file, name)}")
    return found


def _look(file: h5py.File, path: str, name: str, allow_external: bool) -> DatasetLayout:
    dataset = find_dataset(file, name, allow_external=allow_external)
    here = f"{shown(path)}: dataset {shown(name)}"
    if dataset.shape is None or dataset.shape == ():
        kind = "is empty (it has no shape)" if dataset.shape is None else "is a single value"
        raise DataError(f"{here} {kind}; training data needs rows along axis 0")
    _refuse_dtype(here, dataset)
    if 0 in dataset.shape:
        raise DataError(f"{here} is empty: its shape is {dataset.shape}")
    if not allow_external:
        _refuse_other_files(here, path, dataset)
    creation = dataset.id.get_create_plist()
    storage = _STORAGE.get(creation.get_layout(), "unknown")
    unwritten = dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED
    if storage in ("contiguous", "chunked") and unwritten and not dataset.external:
        raise DataError(
            f"{here} was declared with shape {dataset.shape} and never written; "
            "reading it would give nothing but fill values"
        )
    return DatasetLayout(
        name=name,
        shape=tuple(int(extent) for extent in dataset.shape),
        dtype=dataset.dtype.str,
        storage=storage,
        chunks=None if dataset.chunks is None else tuple(int(extent) for extent in dataset.chunks),
        filters=tuple(_filter_name(creation, index) for index in range(creation.get_nfilters())),
        stored_bytes=int(dataset.id.get_storage_size()),
    )


def _filter_name(creation: Any, index: int) -> str:
    code, _, _, name = creation.get_filter(index)
    known = {h5py.h5z.FILTER_DEFLATE: "gzip", h5py.h5z.FILTER_SHUFFLE: "shuffle"}
    return known.get(code) or name.decode("utf-8", "replace") or f"filter {code}"


def _refuse_dtype(here: str, dataset: h5py.Dataset) -> None:
    dtype = dataset.dtype
    if h5py.check_string_dtype(dtype) is not None or dtype.kind in "SU":
        raise DataError(f"{here} holds text; encode it as numbers first")
    if h5py.check_vlen_dtype(dtype) is not None:
        raise DataError(f"{here} is ragged (rows of variable length); pad the rows to one shape and store that")
    if dtype.kind == "O":
        raise DataError(f"{here} holds objects or references, not numbers")
    if dtype.names is not None:
        fields = ", ".join(shown(field) for field in dtype.names[:_LISTED])
        raise DataError(f"{here} is a table with the columns {fields}; store each column as its own dataset")
    if dtype.kind == "c":
        raise DataError(f"{here} holds complex numbers; store the real and imaginary parts as two channels")
    if dtype.kind not in "fiub" or dtype.subdtype is not None:
        raise DataError(f"{here} has the type {dtype}, which is no plain number")


def _refuse_other_files(here: str, path: str, dataset: h5py.Dataset) -> None:
    way_out = "pass allow_external=True if you trust the file"
    if dataset.external:
        other = shown(str(dataset.external[0][0]))
        raise DataError(f"{here} keeps its data in another file, {other}; {way_out}")
    if dataset.is_virtual:
        others = {source.file_name for source in dataset.virtual_sources()} - {
            ".",
            path,
            os.path.basename(path),
        }
        if others:
            raise DataError(f"{here} is virtual and reads other files, such as {shown(sorted(others)[0])}; {way_out}")


def _refuse_external_links(file: h5py.File, name: str) -> None:
    """Walk the path part by part, soft links included, without ever opening another file."""
    pending = [part for part in name.split("/") if part and part != "."]
    group: Any = file
    followed = 0
    while pending and isinstance(group, h5py.Group):
        part = pending.pop(0)
        try:
            link = group.get(part, getlink=True)
        except (KeyError, ValueError, OSError, RuntimeError):
            return  # missing: the caller says so
        if isinstance(link, h5py.ExternalLink):
            raise DataError(
                f"{shown(file.filename)}: {shown(name)} leads through an external link to "
                f"{shown(link.filename)}; pass allow_external=True if you trust the file"
            )
        if isinstance(link, h5py.SoftLink):
            followed += 1
            if followed > _LINKS:
                raise DataError(f"{shown(file.filename)}: {shown(name)} leads through too many soft links")
            target = str(link.path)
            pending = [piece for piece in target.split("/") if piece and piece != "."] + pending
            if target.startswith("/"):
                group = file
            continue
        try:
            group = group[part]
        except (KeyError, ValueError, OSError, RuntimeError):
            return


def _what_exists(file: h5py.File, name: str) -> str:
    found: list[tuple[str, tuple[int, ...] | None, np.dtype[Any]]] = []
    seen = 0

    def note(path: str | bytes, item: Any) -> bool | None:
        nonlocal seen
        path = path if isinstance(path, str) else path.decode("utf-8", "surrogateescape")  # not UTF-8
        seen += 1
        if isinstance(item, h5py.Dataset):
            found.append((path, item.shape, item.dtype))
        return True if seen >= _VISITED else None

    try:
        file.visititems(note)
    except (OSError, RuntimeError, ValueError, KeyError):
        return "Its list of datasets cannot be read"
    if not found:
        return "It holds no datasets at all"
    listed = "; ".join(f"{shown(path)} {shape} {dtype}" for path, shape, dtype in found[:_LISTED])
    more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    by_name = {path.lower(): path for path, _, _ in found} | {
        path.rsplit("/", 1)[-1].lower(): path for path, _, _ in found
    }
    near = difflib.get_close_matches(name.strip("/").lower(), by_name, n=1, cutoff=0.6)
    hint = f"Did you mean {shown(by_name[near[0]])}? " if near else ""
    return f"{hint}It holds: {listed}{more}"
