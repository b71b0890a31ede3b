"""Which logs belong together: one file a rank, told apart by the rank in its path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kerasmem.cluster import rank_of
from kerasmem.errors import UsageError


def group_by_rank(paths: Sequence[str], together: bool = False) -> dict[str, tuple[tuple[int | None, str], ...]]:
    """Return the logs of each training: its name → (rank, path) in the order of ranks.

    Args:
        paths: the logs' paths, each once.
        together: all of them are ranks of one training; those whose paths name no rank are numbered as given.

    Raises:
        UsageError: two paths claim one rank of the same training.
    """
    groups: dict[str, list[tuple[int | None, str]]] = {}
    named = [rank_of(path) for path in paths]
    if together and paths:
        numbers = [rank for _, rank in named]
        if None in numbers:
            numbers = list(range(len(paths)))
        groups[_common([name for name, _ in named])] = list(zip(numbers, paths, strict=True))
    else:
        for (name, rank), path in zip(named, paths, strict=True):
            groups.setdefault(name, []).append((rank, path))
    for name, members in groups.items():
        members.sort(key=lambda member: -1 if member[0] is None else member[0])
        for (one, first), (other, second) in pairwise(members):
            if one == other:
                raise UsageError(f"{name}: {first} and {second} are both rank {one}; give each rank's log once")
    return {name: tuple(members) for name, members in groups.items()}


def _common(names: Sequence[str]) -> str:
    return names[0] if len(set(names)) == 1 else f"{names[0]} and {len(names) - 1} more"
