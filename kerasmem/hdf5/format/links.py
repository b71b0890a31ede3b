"""Data that a file only names and another file holds: found without being opened, and refused.

HDF5 opens whatever an external link, a virtual dataset or external storage names: a secret file, or a pipe on which it
waits for ever. So names are followed here first, part by part, unless the user trusts the file. Nobody asks for a
dataset's shape before that: for the shape of a virtual dataset without an end HDF5 opens its sources.
"""

from __future__ import annotations

import os
from typing import Any

import h5py

from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import shown

_LINKS = 16  # soft links followed for one name
_TRUST = "pass trust_file=True if you trust the file"

DAMAGED = (OSError, RuntimeError, ValueError, TypeError, LookupError, OverflowError, MemoryError, EOFError)
"""What h5py raises at damaged files, one as well as another."""


def encoded(name: str) -> str | bytes:
    """Return a name as h5py takes it: one that is no UTF-8 in the file comes as "surrogateescape" text."""
    return name.encode("utf-8", "surrogateescape") if not name.isascii() else name


def walk_objects(group: h5py.Group, most: int) -> tuple[dict[str, Any], bool]:
    """Return the groups and datasets of a file or a group by name, so many at most, and whether these are all.

    The errors of damaged files are in `DAMAGED`.
    """
    places: dict[int, bytes] = {}
    itself = h5py.h5o.get_info(group.id).addr

    def note(path: bytes, info: Any) -> bool | None:  # which must raise nothing: h5py breaks at it
        if info.type == h5py.h5l.TYPE_HARD and info.u != itself:
            places.setdefault(info.u, path)
        return True if len(places) >= most else None

    complete = group.id.links.visit(note, info=True) is None
    objects = {path.decode("utf-8", "surrogateescape"): group[path] for path in places.values()}  # may be no UTF-8
    return objects, complete


def shape_of(dataset: h5py.Dataset) -> tuple[int, ...] | None:
    """Return the shape of a dataset without opening another file, or None.

    Of a virtual dataset that grows with its sources this is the shape that it was written with.
    """
    creation = dataset.id.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL and creation.get_virtual_count():
        return tuple(map(int, creation.get_virtual_vspace(0).shape))
    return None if dataset.shape is None else tuple(map(int, dataset.shape))


def points_of(space: Any) -> int:
    """Return the number of values in a selection, or -1 if it has no end."""
    try:
        return int(space.get_select_npoints())
    except RuntimeError:
        return -1


def open_dataset(file: h5py.File, name: str, *, trust_file: bool) -> Any:
    """Return the object under a name. Without trust, HDF5 must open no other file for it.

    Args:
        file: the file.
        name: full path of the object.
        trust_file: whether HDF5 may follow whatever the file names.

    Raises:
        DataError: If another file would be opened.
        KeyError: If there is no such object; other errors of damaged files are in `DAMAGED`.
    """
    if trust_file:
        return file[encoded(name)]
    _check_path(file, name)
    found = file[encoded(name)]
    if isinstance(found, h5py.Dataset):
        here = f"{shown(file.filename)}: dataset {shown(name)}"
        creation = found.id.get_create_plist()
        if creation.get_external_count():
            other = shown(os.fsdecode(creation.get_external(0)[0]))
            raise DataError(f"{here} keeps its data in another file, {other}; {_TRUST}")
        if creation.get_layout() == h5py.h5d.VIRTUAL:
            raise DataError(f"{here} is virtual and may read other files; {_TRUST}")
    return found


def _check_path(file: h5py.File, name: str) -> None:
    """Walk a path part by part, soft links included, without ever having HDF5 open another file."""
    pending = _parts(name.encode("utf-8", "surrogateescape"))
    group: Any = file
    followed = 0
    while pending and isinstance(group, h5py.Group):
        part = pending.pop(0)
        try:
            info = group.id.links.get_info(part)
            kind = info.type
            target = group.id.links.get_val(part) if kind != h5py.h5l.TYPE_HARD else b""
            if kind == h5py.h5l.TYPE_HARD:
                group = group[part]
        except DAMAGED:
            return  # missing: the caller says so
        if kind == h5py.h5l.TYPE_HARD:
            continue
        followed += 1
        if followed > _LINKS:
            raise DataError(f"{shown(file.filename)}: {shown(name)} leads through too many soft links")
        if kind != h5py.h5l.TYPE_SOFT:
            other = shown(os.fsdecode(target[0])) if isinstance(target, tuple) else "elsewhere"
            here = f"{shown(file.filename)}: {shown(name)}"
            raise DataError(f"{here} leads through an external link to {other}; {_TRUST}")
        pending = _parts(target) + pending
        if target.startswith(b"/"):
            group = file


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]
