"""The logs of several ranks as one training: which belong together, the largest of all, and each rank's own.

There is one file a rank, told apart by the rank in its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

from kerasmem.cluster import rank_of
from kerasmem.errors import UsageError
from kerasmem.monitoring.log_summary import FORMAT_VERSION, LogSummary
from kerasmem.monitoring.phases import largest_known

_SIZES = ("peak_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes", "swap_bytes")


@dataclass(frozen=True)
class RankMaximum:
    """The largest of a size over ranks, and whose it is.

    Attributes:
        bytes: the largest.
        rank: whose; None where there is one log, of no rank.
    """

    bytes: int
    rank: int | None


@dataclass(frozen=True)
class TrainingLogs:
    """One training: one log, or one a rank.

    Attributes:
        name: the log's name; "*" in place of the rank where there are several.
        logs: in the order of ranks.
    """

    name: str
    logs: tuple[LogSummary, ...]

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks below the highest without a log (the first hundred); one log alone misses none."""
        there = {log.rank for log in self.logs if log.rank is not None}
        if len(there) < 2:
            return ()
        gaps = (rank for rank in range(max(there)) if rank not in there)
        return tuple(rank for _, rank in zip(range(100), gaps, strict=False))

    def largest(self, size: str) -> RankMaximum | None:
        """Return the largest of a size over all ranks and runs; None where no rank knows it.

        Args:
            size: "peak_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes" or "swap_bytes".
        """
        sizes = [(largest_known(getattr(run, size) for run in log.runs), log.rank) for log in self.logs]
        found = [RankMaximum(most, rank) for most, rank in sizes if most is not None]
        return max(found, key=attrgetter("bytes"), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the training as plain data: the merged view, then each log."""
        merged: dict[str, Any] = {}
        for size in _SIZES:
            largest = self.largest(size)
            merged[size] = None if largest is None else largest.bytes
            merged[size.replace("_bytes", "_rank")] = None if largest is None else largest.rank
        return {
            "name": self.name,
            "ranks": [log.rank for log in self.logs],
            "missing_ranks": list(self.missing_ranks),
            "merged": merged,
            "logs": [log.to_dict() for log in self.logs],
        }


def trainings_to_dict(trainings: Sequence[TrainingLogs]) -> dict[str, Any]:
    """Return trainings as the object that `kerasmem report --json` prints."""
    return {"format_version": FORMAT_VERSION, "trainings": [training.to_dict() for training in trainings]}


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
