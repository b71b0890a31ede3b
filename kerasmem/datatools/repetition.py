"""Recognize and stack groups that are samples, such as s0/obs, s1/obs and so on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kerasmem.datatools.listing import Entry
from kerasmem.hdf5.format.layout import shown, type_name
from kerasmem.hdf5.rows.settings import natural_order

_LEAST_GROUPS = 8
_SHAPES_SHOWN = 3
_NUMBER = re.compile(r"[<>|][iufb]")  # how NumPy's texts for numbers begin


@dataclass(frozen=True)
class Repetition:
    """Groups with names that differ in numbers alone, a sample each.

    Args:
        title: number of the groups, and the first and last of them.
        stacked: an entry for each dataset of all groups, with a problem if it cannot be stacked.
        first: entries of the first group.
        outside: entries outside the groups.
    """

    title: str
    stacked: list[Entry]
    first: list[Entry]
    outside: list[Entry]


def find_repetition(entries: Sequence[Entry]) -> Repetition | None:
    """Return the largest set of at least eight groups that repeat one layout, or None."""
    layouts: dict[str, dict[str, dict[str, Entry]]] = {}
    for entry in entries:
        for slash in re.finditer("/", entry.name):
            group, member = entry.name[: slash.start()], entry.name[slash.end() :]
            parent, _, last = group.rpartition("/")
            layout = f"{parent}/{re.sub(r'[0-9]+', '0', last)}"
            if re.search("[0-9]", last):
                layouts.setdefault(layout, {}).setdefault(group, {})[member] = entry
    groups = max(layouts.values(), key=len, default={})
    names = sorted(groups, key=natural_order)
    if len(names) < _LEAST_GROUPS:
        return None
    parent = names[0].rpartition("/")[0]
    stacked = [
        _stack(f"{parent}/{member}".lstrip("/"), [groups[name][member] for name in names])
        for member in groups[names[0]]
        if all(member in members for members in groups.values())
    ]
    if not stacked:
        return None
    title = f"{len(names):,} groups, {shown(names[0])} to {shown(names[-1])}"
    inside = {entry.name for members in groups.values() for entry in members.values()}
    outside = [entry for entry in entries if entry.name not in inside]
    return Repetition(title, stacked, list(groups[names[0]].values()), outside)


def _stack(name: str, entries: Sequence[Entry]) -> Entry:
    first, count = entries[0], f"{len(entries):,} groups"
    for entry in entries:
        if entry.layout is None and not (entry.shape == () and _NUMBER.match(entry.dtype)):
            return Entry(name, None, first.dtype, None, f"in {count}: {entry.problem}")
    kinds = list(dict.fromkeys(f"{type_name(entry.dtype)} {entry.shape}" for entry in entries))
    if len(kinds) > 1:
        kinds[_SHAPES_SHOWN:] = ["…"] if len(kinds) > _SHAPES_SHOWN else []
        problem = f"differs among {count}, a sample each: {', '.join(kinds)}"
        return Entry(name, None, first.dtype, None, problem, "ragged")
    return Entry(
        name, (len(entries), *(first.shape or ())), first.dtype, None, "", "stack",
        stored_bytes=sum(entry.stored_bytes for entry in entries),
        packing=first.packing if all(entry.packing == first.packing for entry in entries) else None,
        parts=tuple(entry.name for entry in entries),
    )  # fmt: skip
