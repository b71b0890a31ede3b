"""The logs of several ranks as one training: the largest of all, and each rank's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

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
