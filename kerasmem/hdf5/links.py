"""Data that a file only names and another file holds: found without being opened, and refused.

HDF5 opens whatever an external link, a virtual dataset or external storage names: a secret file, or a pipe on which it
waits for ever. So names are followed here first, part by part, and nobody asks for a dataset's shape before that: for
the shape of a virtual dataset without an end HDF5 opens its sources.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import h5py

from kerasmem.errors import DataError
from kerasmem.hdf5.direct.indexes import refuse_endless_index, refuse_endless_sources
from kerasmem.hdf5.direct.raw import RawError, RawFile, raw_file
from kerasmem.hdf5.layout import shown

_SOURCES = 10_000  # of a virtual dataset, looked at one by one
_DEPTH = 16  # virtual datasets that read virtual datasets
_LINKS = 16  # soft and external links followed for one name
_WAY_OUT = "pass allow_external=True if you trust the file"
_ENDLESS = int(h5py.h5s.UNLIMITED)  # how often a block is repeated as long as there is data
_LINK_FOLDERS, _SOURCE_FOLDERS, _RAW_FOLDERS = "HDF5_EXT_PREFIX", "HDF5_VDS_PREFIX", "HDF5_EXTFILE_PREFIX"

DAMAGED = (OSError, RuntimeError, ValueError, TypeError, LookupError, OverflowError, MemoryError, EOFError)
"""What h5py raises at damaged files, one as well as another."""


def encoded(name: str) -> str | bytes:
    """Return a name as h5py takes it: one that is no UTF-8 in the file comes as "surrogateescape" text."""
    return name.encode("utf-8", "surrogateescape") if not name.isascii() else name


def walk_objects(group: h5py.Group, most: int) -> tuple[dict[str, Any], bool]:
    """Return the groups and datasets of a file or a group by name, so many at most, and whether these are all.

    Raises:
        RawError: one has a list of sources that HDF5 would go through without end; what else h5py raises at damage is
            in `DAMAGED`.
    """
    places: dict[int, bytes] = {}
    itself = h5py.h5o.get_info(group.id).addr

    def note(path: bytes, info: Any) -> bool | None:  # which must raise nothing: h5py breaks at it
        if info.type == h5py.h5l.TYPE_HARD and info.u != itself:
            places.setdefault(info.u, path)
        return True if len(places) >= most else None

    complete = group.id.links.visit(note, info=True) is None
    found, raw = {}, raw_file(group if isinstance(group, h5py.File) else group.file)
    for place, path in places.items():
        refuse_endless_sources(raw, place)
        found[path.decode("utf-8", "surrogateescape")] = group[path]  # may be no UTF-8
    return found, complete


def shape_of(dataset: h5py.Dataset) -> tuple[int, ...] | None:
    """Return the shape of a dataset without opening another file; None where it has none.

    Of a virtual dataset that grows with its sources this is the shape that it was written with.
    """
    creation = dataset.id.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL and creation.get_virtual_count():
        return tuple(map(int, creation.get_virtual_vspace(0).shape))
    return None if dataset.shape is None else tuple(map(int, dataset.shape))


def points_of(space: Any) -> int:
    """Return how many values a selection has; -1 where it has no end."""
    try:
        return int(space.get_select_npoints())
    except RuntimeError:
        return -1


def open_dataset(file: h5py.File, name: str, *, allow_external: bool) -> Any:
    """Return what lies under a name, once it is known that HDF5 opens no other file for it, or may.

    Args:
        file: the file.
        name: full path of the object.
        allow_external: other files may be read, unless they are pipes or devices.

    Raises:
        DataError: another file would be opened.
        KeyError: there is no such object; what else h5py raises at damage is in `DAMAGED`.
    """
    trail = _Trail(allow_external)
    _check_path(file, name, trail)
    found = file[encoded(name)]
    if isinstance(found, h5py.Dataset):
        _check_storage(file, name, found, trail)
    return found


def source_files(file: h5py.File, where: str) -> list[str]:
    """Return which files HDF5 may take for the one that a virtual dataset names, those that are there."""
    return _existing(file, where, _SOURCE_FOLDERS)


@dataclass
class _Trail:
    """What was looked at on the way from one name: the datasets by their files, and how deep they lie."""

    allow_external: bool
    seen: set[tuple[str, str]] = field(default_factory=set)
    inside: set[tuple[str, str]] = field(default_factory=set)  # those that are being looked at
    depth: int = 0


def _check_storage(file: h5py.File, name: str, dataset: h5py.Dataset, trail: _Trail) -> None:
    """Refuse data that lies in other files, also at the end of a row of virtual datasets."""
    here = f"{shown(file.filename)}: dataset {shown(name)}"
    creation = dataset.id.get_create_plist()
    for number in range(creation.get_external_count()):
        other = os.fsdecode(creation.get_external(number)[0])
        if not trail.allow_external:
            raise DataError(f"{here} keeps its data in another file, {shown(other)}; {_WAY_OUT}")
        places = _existing(file, other, _RAW_FOLDERS)
        if not places:
            raise DataError(
                f"{here} keeps its data in another file, {shown(other)}, which is not there; HDF5 looks for it from "
                f"the current folder, {shown(os.getcwd())}, and in ${_RAW_FOLDERS}"
            )
        for place in places:
            _refuse_special(place, here)
    if creation.get_layout() != h5py.h5d.VIRTUAL:
        return
    trail.depth += 1
    for number, (where, source) in enumerate(_named_sources(here, creation)):
        _check_source(file, here, where, source, trail)
        if where == "." and "%" not in source:
            _check_selection(file, here, source, creation, number)
    trail.depth -= 1


def _named_sources(here: str, creation: Any) -> Iterator[tuple[str, str]]:
    """Yield file and name of each source of a virtual dataset."""
    try:
        for number in range(creation.get_virtual_count()):
            yield creation.get_virtual_filename(number), creation.get_virtual_dsetname(number)
    except DAMAGED as error:
        raise DataError(f"{here} is virtual, and its list of sources cannot be read; {_WAY_OUT}") from error


def _check_source(file: h5py.File, here: str, where: str, source: str, trail: _Trail) -> None:
    if not trail.allow_external:
        if where != ".":
            raise DataError(f"{here} is virtual and reads other files, such as {shown(where)}; {_WAY_OUT}")
        if "%" in source:
            raise DataError(f"{here} is virtual and names its sources by a pattern, {shown(source)}; {_WAY_OUT}")
    key = (f"{file.filename}\0{where}", source)
    if key in trail.inside:  # which HDF5 follows until its stack is full
        raise DataError(
            f"{here} is virtual and reads itself by way of {shown(source)}; it is damaged: write the file again"
        )
    if key in trail.seen:
        return
    trail.seen.add(key)
    if trail.depth > _DEPTH or (len(trail.seen) > _SOURCES and not trail.allow_external):
        way_out = "name one of its sources instead" if trail.allow_external else _WAY_OUT
        raise DataError(f"{here} is virtual and has too many sources, or sources within sources; {way_out}")
    trail.inside.add(key)
    if where == ".":
        _check_source_in(file, here, source, trail)
    else:
        for place in source_files(file, where):
            _refuse_special(place, here)
            _look_into(place, lambda other: _check_source_in(other, here, source, trail))
    trail.inside.discard(key)


def _check_source_in(file: h5py.File, here: str, source: str, trail: _Trail) -> None:
    for name in (source, *_blocks(file, source, trail)):
        _check_path(file, name, trail)
        try:
            found = file.get(encoded(name))
        except DAMAGED as error:
            if trail.allow_external:
                continue  # HDF5 cannot open it either
            raise DataError(f"{here} is virtual, and its source {shown(name)} cannot be opened") from error
        if isinstance(found, h5py.Dataset):
            _check_storage(file, name, found, trail)


def _check_selection(file: h5py.File, here: str, source: str, creation: Any, number: int) -> None:
    """Refuse what lies outside the source: HDF5 reads beyond its end, memory of the process, or divides by zero."""
    try:
        there = file.get(encoded(source))
        shape = shape_of(there) if isinstance(there, h5py.Dataset) else None
        taken = creation.get_virtual_srcspace(number)
        if shape is None or taken.get_select_type() == h5py.h5s.SEL_NONE:
            return
        if taken.get_select_type() == h5py.h5s.SEL_ALL:  # whose extent is not stored
            fits = points_of(creation.get_virtual_vspace(number)) == prod(shape)
        else:
            fits = taken.get_simple_extent_ndims() == len(shape) and _lies_within(taken, shape)
    except DAMAGED as error:
        raise DataError(f"{here} is virtual, and where it lies in {shown(source)} cannot be read") from error
    if not fits:
        raise DataError(
            f"{here} is virtual and speaks of more than its source {shown(source)} of shape {shape} holds; it is "
            "damaged: write the file again"
        )


def _lies_within(taken: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a selection is of a dataset of some shape; where it has no end HDF5 ends it with the dataset."""
    if taken.is_regular_hyperslab():
        start, stride, count, block = (tuple(map(int, each)) for each in taken.get_regular_hyperslab())
        endless = [_ENDLESS in (often, long) for often, long in zip(count, block, strict=True)]
        ends = [
            at + (often - 1) * step + long for at, step, often, long in zip(start, stride, count, block, strict=True)
        ]
        return all(free or end <= extent for free, end, extent in zip(endless, ends, shape, strict=True))
    return all(int(last) < extent for last, extent in zip(taken.get_select_bounds()[1], shape, strict=True))


def _blocks(file: h5py.File, source: str, trail: _Trail) -> list[str]:
    """Return the datasets that a name with a number for each block in it may stand for."""
    folder, _, last = source.rpartition("/")
    if "%" not in last:
        return []
    _check_path(file, folder, trail)
    group = file.get(encoded(folder)) if folder.strip("/") else file
    names = list(group) if isinstance(group, h5py.Group) else []
    return [f"{folder}/{name}" for name in fnmatch.filter(names, _pattern(last))]


def _check_path(file: h5py.File, name: str, trail: _Trail) -> None:
    """Walk a path part by part, soft links included, without ever having HDF5 open another file."""
    pending = _parts(name.encode("utf-8", "surrogateescape"))
    group: Any = file
    raw = raw_file(file)
    followed = 0
    while pending and isinstance(group, h5py.Group):
        part = pending.pop(0)
        try:
            info = group.id.links.get_info(part)
            kind = info.type
            target = group.id.links.get_val(part) if kind != h5py.h5l.TYPE_HARD else b""
            if kind == h5py.h5l.TYPE_HARD:
                _refuse_endless(file, raw, info.u, name)
                group = group[part]
        except DataError:
            raise
        except DAMAGED:
            return  # missing: the caller says so
        if kind == h5py.h5l.TYPE_HARD:
            continue
        followed += 1
        if followed > _LINKS:
            raise DataError(f"{shown(file.filename)}: {shown(name)} leads through too many soft links")
        if kind != h5py.h5l.TYPE_SOFT:
            _check_link(file, name, target, pending, trail)
            return
        pending = _parts(target) + pending
        if target.startswith(b"/"):
            group = file


def _refuse_endless(file: h5py.File, raw: RawFile, address: int, name: str) -> None:
    """Refuse an object that HDF5 may not be asked for: it would go through it without end."""
    try:
        refuse_endless_sources(raw, address)
        refuse_endless_index(raw, address)
    except RawError as error:
        raise DataError(
            f"{shown(file.filename)}: dataset {shown(name)} cannot be read: {error}; copy or write the file again"
        ) from error


def _check_link(file: h5py.File, name: str, target: Any, rest: list[bytes], trail: _Trail) -> None:
    """Refuse an external link, or what it leads to."""
    here = f"{shown(file.filename)}: {shown(name)}"
    other = os.fsdecode(target[0]) if isinstance(target, tuple) else ""
    if not trail.allow_external or not other:
        raise DataError(
            f"{here} leads through an external link to {shown(other) if other else 'elsewhere'}; {_WAY_OUT}"
        )
    inside = b"/".join([target[1], *rest]).decode("utf-8", "surrogateescape")
    trail.depth += 1
    if trail.depth > _DEPTH:
        raise DataError(f"{here} leads through too many files")
    for place in _existing(file, other, _LINK_FOLDERS):
        _refuse_special(place, here)
        _look_into(place, lambda opened: _check_source_in(opened, here, inside, trail))
    trail.depth -= 1


def _look_into(path: str, check: Callable[[h5py.File], None]) -> None:
    """Have another file looked at; one that HDF5 cannot open leads nowhere."""
    try:
        file = h5py.File(path, "r", locking=False)
    except DAMAGED:
        return
    with file:
        check(file)


def _refuse_special(path: str, here: str) -> None:
    """Refuse a pipe, a device or a socket: HDF5 would wait for it, or read from it without end."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(f"{here} leads to {shown(path)}, which is no regular file but a pipe or a device; leave it out")


def _existing(file: h5py.File, name: str, variable: str) -> list[str]:
    """Return where HDF5 may look for another file, those places where there is one.

    It takes the name as it is, then the folders of a variable, the folder of the file and that of its target where it
    is a symbolic link, and the current folder; of an absolute name the last part is looked for as well.
    """
    folders = [os.path.dirname(path) for path in (os.path.abspath(file.filename), os.path.realpath(file.filename))]
    named = os.environ.get(variable, "").replace("${ORIGIN}", folders[1]).split(os.pathsep)
    names = dict.fromkeys((name, os.path.basename(name)))
    places = dict.fromkeys(os.path.abspath(os.path.join(each, one)) for one in names for each in (*named, *folders, ""))
    there = [place for place in places if os.path.exists(place)]
    return there + [found for place in places if "%" in name for found in glob.iglob(_pattern(place))]


def _pattern(name: str) -> str:
    """Return a pattern that fits the names of all blocks where %b stands for the number of one."""
    return glob.escape(name).replace("%%", "%").replace("%b", "*")


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]
