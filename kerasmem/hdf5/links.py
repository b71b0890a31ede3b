"""Data that a file only names and another file holds: found without being followed, and refused."""

from __future__ import annotations

import os
from typing import Any

import h5py

from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown

_SOURCES = 10_000  # of a virtual dataset in the same file, looked at one by one
_DEPTH = 16  # virtual datasets that read virtual datasets
_LINKS = 16  # soft links followed for one name

DAMAGED = (OSError, RuntimeError, ValueError, TypeError, LookupError, OverflowError, MemoryError, EOFError)
"""What h5py raises at damaged files, one as well as another."""


def encoded(name: str) -> str | bytes:
    """Return a name as h5py takes it: one that is no UTF-8 in the file comes as "surrogateescape" text."""
    return name.encode("utf-8", "surrogateescape") if not name.isascii() else name


def walk_objects(file: h5py.File, most: int) -> tuple[dict[str, Any], bool]:
    """Return the groups and datasets of a file by name, so many at most, and whether these are all."""
    found: dict[str, Any] = {}

    def note(path: str | bytes, item: Any) -> bool | None:
        name = path if isinstance(path, str) else path.decode("utf-8", "surrogateescape")  # not UTF-8
        found[name] = item
        return True if len(found) >= most else None

    return found, file.visititems(note) is None


def refuse_other_files(file: h5py.File, name: str, dataset: h5py.Dataset, seen: set[str], depth: int) -> None:
    """Refuse data that lies in other files, also at the end of a row of virtual datasets."""
    here = f"{shown(file.filename)}: dataset {shown(name)}"
    way_out = "pass allow_external=True if you trust the file"
    if dataset.external:
        other = shown(str(dataset.external[0][0]))
        raise DataError(f"{here} keeps its data in another file, {other}; {way_out}")
    if not dataset.is_virtual:
        return
    for source in _sources_inside(here, dataset, way_out):
        if source in seen:
            continue
        seen.add(source)
        if len(seen) > _SOURCES or depth >= _DEPTH:
            raise DataError(f"{here} is virtual and has too many sources, or sources within sources; {way_out}")
        refuse_external_links(file, source)
        try:
            found = file.get(encoded(source))
        except DAMAGED as error:
            raise DataError(f"{here} is virtual, and its source {shown(source)} cannot be opened") from error
        if isinstance(found, h5py.Dataset):
            refuse_other_files(file, source, found, seen, depth + 1)


def _sources_inside(here: str, dataset: h5py.Dataset, way_out: str) -> list[str]:
    """Return the sources of a virtual dataset, all of them in the file itself."""
    try:
        named = dict.fromkeys((source.file_name, source.dset_name) for source in dataset.virtual_sources())
    except DAMAGED as error:
        raise DataError(f"{here} is virtual, and its list of sources cannot be read; {way_out}") from error
    for where, source in named:
        if where != ".":
            raise DataError(f"{here} is virtual and reads other files, such as {shown(where)}; {way_out}")
        if "%" in source:
            raise DataError(f"{here} is virtual and names its sources by a pattern, {shown(source)}; {way_out}")
    return [source for _, source in named]


def refuse_external_links(file: h5py.File, name: str) -> None:
    """Walk the path part by part, soft links included, without ever opening another file."""

    def parts(path: bytes) -> list[bytes]:
        return [part for part in path.split(b"/") if part not in (b"", b".")]

    pending = parts(name.encode("utf-8", "surrogateescape"))
    group: Any = file
    followed = 0
    while pending and isinstance(group, h5py.Group):
        part = pending.pop(0)
        try:
            kind = group.id.links.get_info(part).type
            target = group.id.links.get_val(part) if kind != h5py.h5l.TYPE_HARD else b""
            if kind == h5py.h5l.TYPE_HARD:
                group = group[part]
        except DAMAGED:
            return  # missing: the caller says so
        if kind == h5py.h5l.TYPE_SOFT:
            followed += 1
            if followed > _LINKS:
                raise DataError(f"{shown(file.filename)}: {shown(name)} leads through too many soft links")
            pending = parts(target) + pending
            if target.startswith(b"/"):
                group = file
        elif kind != h5py.h5l.TYPE_HARD:
            other = shown(os.fsdecode(target[0])) if isinstance(target, tuple) else "elsewhere"
            raise DataError(
                f"{shown(file.filename)}: {shown(name)} leads through an external link to {other}; "
                "pass allow_external=True if you trust the file"
            )
