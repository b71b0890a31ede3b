"""Which logs belong together: one file a rank, told apart by the rank in its path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kerasmem.cluster import Worker
from kerasmem.errors import UsageError

_RANK = re.compile(r"(?<![A-Za-z])(?:rank|worker)[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)


def rank_of(path: str) -> tuple[str, int | None]:
    """Return the path with its rank as "*", and the rank; None where the path names none.

    The last "rank" or "worker" that a number follows counts, in the file's name or a folder's.

    Example:
        >>> rank_of("logs/run.rank3.jsonl"), rank_of("worker_1/run.csv"), rank_of("frank3.csv")
        (('logs/run.rank*.jsonl', 3), ('worker_*/run.csv', 1), ('frank3.csv', None))
    """
    found = list(_RANK.finditer(path))
    if not found:
        return path, None
    start, end = found[-1].span(1)
    return f"{path[:start]}*{path[end:]}", int(found[-1][1])


def own_path(path: Path, worker: Worker | None) -> Path:
    """Return where a worker writes: the path with its rank before the suffix, unless that names its rank already.

    A path that names another rank gets one too: all workers may have been given the same.

    Example:
        >>> own_path(Path("run.jsonl"), Worker(1, 2)).name, own_path(Path("run.rank1.jsonl"), Worker(1, 2)).name
        ('run.rank1.jsonl', 'run.rank1.jsonl')
    """
    if worker is None or rank_of(str(path))[1] == worker.rank:
        return path
    return path.with_name(f"{path.stem}.rank{worker.rank}{path.suffix}")


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
