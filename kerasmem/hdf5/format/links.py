"""Find datasets, refusing those with data in other files.

HDF5 opens every file that an external link, a virtual dataset or external storage names, even a secret file, or a pipe
that blocks forever. So unless the user trusts a file, its links are followed here first, one by one. Shapes are read
only after that: to compute the shape of an unlimited virtual dataset, HDF5 opens its sources.
"""

from __future__ import annotations

import os
from typing import Any

import h5py

from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import quote

_MOST_LINKS = 16  # soft links followed for one name
_TRUST = "pass trust_file=True if you trust the file"

DAMAGED = (OSError, RuntimeError, ValueError, TypeError, LookupError, OverflowError, MemoryError, EOFError)
"""Errors that h5py may raise for damaged files."""


def encode_name(name: str) -> str | bytes:
    """Return a name for h5py: bytes, if the "surrogateescape" text may stand for invalid UTF-8."""
    return name.encode("utf-8", "surrogateescape") if not name.isascii() else name


def walk_objects(group: h5py.Group, most: int) -> tuple[dict[str, Any], bool]:
    """Return at most `most` groups and datasets below a group by path, and whether the list is complete.

    Damaged files raise errors of `DAMAGED`.
    """
    paths: dict[int, bytes] = {}  # by address
    root = h5py.h5o.get_info(group.id).addr

    def note(path: bytes, info: Any) -> bool | None:  # must not raise: h5py fails at exceptions of callbacks
        if info.type == h5py.h5l.TYPE_HARD and info.u != root:
            paths.setdefault(info.u, path)
        return True if len(paths) >= most else None

    complete = group.id.links.visit(note, info=True) is None
    objects = {path.decode("utf-8", "surrogateescape"): group[path] for path in paths.values()}
    return objects, complete


def shape_of(dataset: h5py.Dataset) -> tuple[int, ...] | None:
    """Return the shape of a dataset without opening other files, or None if it has none.

    A virtual dataset that grows with its sources has the shape that it was written with.
    """
    creation = dataset.id.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL and creation.get_virtual_count():
        return tuple(map(int, creation.get_virtual_vspace(0).shape))
    return None if dataset.shape is None else tuple(map(int, dataset.shape))


def points_of(space: Any) -> int:
    """Return the number of values in a selection, or -1 if it is unlimited."""
    try:
        return int(space.get_select_npoints())
    except RuntimeError:
        return -1


def open_dataset(file: h5py.File, name: str, *, trust_file: bool) -> Any:
    """Open an object by name. Unless the file is trusted, HDF5 opens no other file.

    Args:
        file: the file.
        name: full path of the object.
        trust_file: whether HDF5 may open the files that links name.

    Raises:
        DataError: If HDF5 would open another file.
        KeyError: If the object does not exist. Other errors of damaged files are in `DAMAGED`.
    """
    if trust_file:
        return file[encode_name(name)]
    _check_path(file, name)
    item = file[encode_name(name)]
    if isinstance(item, h5py.Dataset):
        label = f"{quote(file.filename)}: dataset {quote(name)}"
        creation = item.id.get_create_plist()
        if creation.get_external_count():
            other = quote(os.fsdecode(creation.get_external(0)[0]))
            raise DataError(f"{label} keeps its data in another file, {other}; {_TRUST}")
        if creation.get_layout() == h5py.h5d.VIRTUAL:
            raise DataError(f"{label} is virtual and may read other files; {_TRUST}")
    return item


def _check_path(file: h5py.File, name: str) -> None:
    """Follow a path link by link, and refuse links to other files."""
    pending = _split(name.encode("utf-8", "surrogateescape"))
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
            return  # the caller reports a missing object
        if kind == h5py.h5l.TYPE_HARD:
            continue
        followed += 1
        if followed > _MOST_LINKS:
            raise DataError(f"{quote(file.filename)}: {quote(name)} leads through too many soft links")
        if kind != h5py.h5l.TYPE_SOFT:
            other = quote(os.fsdecode(target[0])) if isinstance(target, tuple) else "elsewhere"
            label = f"{quote(file.filename)}: {quote(name)}"
            raise DataError(f"{label} leads through an external link to {other}; {_TRUST}")
        pending = _split(target) + pending
        if target.startswith(b"/"):
            group = file


def _split(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]
