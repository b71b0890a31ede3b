"""Recognize and stack groups that are samples, such as s0/obs, s1/obs and so on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kerasmem.datatools.listing import Entry
from kerasmem.hdf5.format.layout import shown, type_name
from kerasmem.hdf5.rows.settings import natural_order

_LEAST_GROUPS = 8
_SHAPES_SHOWN = 3


@dataclass(frozen=True)
class Repetition:
    """Groups with names that differ in numbers alone, and the datasets of all of them.

    Args:
        groups: paths of the groups, s2 before s10.
        members: entries of a dataset, one a group, by the name that the stacked dataset gets.
    """

    groups: tuple[str, ...]
    members: dict[str, tuple[Entry, ...]]

    @property
    def title(self) -> str:
        """Number of the groups, and the first and last of them."""
        return f"{len(self.groups):,} groups, {shown(self.groups[0])} to {shown(self.groups[-1])}"

    def divide(self, entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Return the entries that lie in the groups, and the others."""
        groups, depth = set(self.groups), self.groups[0].count("/") + 1
        parts: tuple[list[Entry], list[Entry]] = ([], [])
        for entry in entries:
            is_outside = "/".join(entry.name.split("/")[:depth]) not in groups
            parts[is_outside].append(entry)
        return parts

    def stacked(self) -> list[Entry]:
        """Return an entry for each stacked dataset, with a problem if it cannot be stacked."""
        return [_stack(name, entries) for name, entries in self.members.items()]


def find_repetition(entries: Sequence[Entry]) -> Repetition | None:
    """Return the largest set of at least eight groups that repeat one layout, or None."""
    layouts: dict[str, dict[str, dict[str, Entry]]] = {}
    for entry in entries:
        parts = entry.name.split("/")
        for depth, part in enumerate(parts[:-1]):
            pattern = re.sub(r"\d+", "0", part)
            if pattern != re.sub(r"\d+", "", part):
                group = "/".join(parts[: depth + 1])
                groups = layouts.setdefault("/".join([*parts[:depth], pattern]), {})
                groups.setdefault(group, {})["/".join(parts[depth + 1 :])] = entry
    largest = max(layouts.values(), key=len, default={})
    if len(largest) < _LEAST_GROUPS:
        return None
    order = sorted(largest, key=natural_order)
    parent = order[0].rpartition("/")[0]
    members = {}
    for member in largest[order[0]]:
        if all(member in largest[group] for group in order):
            name = f"{parent}/{member}" if parent else member
            members[name] = tuple(largest[group][member] for group in order)
    return Repetition(tuple(order), members) if members else None


def _stack(name: str, entries: Sequence[Entry]) -> Entry:
    first = entries[0]
    problems = [entry.problem for entry in entries if entry.layout is None and not _is_number(entry)]
    if problems:
        return Entry(name, None, first.dtype, None, f"in {len(entries):,} groups: {problems[0]}")
    layouts = dict.fromkeys((entry.shape, entry.dtype) for entry in entries)
    if len(layouts) > 1:
        listed = ", ".join(f"{type_name(dtype)} {shape}" for shape, dtype in list(layouts)[:_SHAPES_SHOWN])
        listed += ", …" if len(layouts) > _SHAPES_SHOWN else ""
        problem = f"differs among {len(entries):,} groups, a sample each: {listed}"
        return Entry(name, None, first.dtype, None, problem, "ragged")
    return Entry(
        name, (len(entries), *(first.shape or ())), first.dtype, None, "", "stack",
        stored_bytes=sum(entry.stored_bytes for entry in entries),
        packing=first.packing if all(entry.packing == first.packing for entry in entries) else None,
        parts=tuple(entry.name for entry in entries),
    )  # fmt: skip


def _is_number(entry: Entry) -> bool:
    """Return whether an entry is a single number."""
    try:
        return entry.shape == () and np.dtype(entry.dtype).kind in "iufb"
    except TypeError:
        return False
