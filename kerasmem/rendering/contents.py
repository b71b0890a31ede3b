"""Contents of a report: logs, and saved estimates and profiles under the names of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kerasmem.errors import InputError
from kerasmem.estimation.report import MemoryReport
from kerasmem.monitoring.log_summary import LogSummary
from kerasmem.profiling.results import StepProfile

_MOST_BYTES = 2**60  # beyond any memory; a chart cannot scale more


@dataclass(frozen=True)
class SavedReport:
    """An estimate, measurement or profile, and the file it comes from."""

    source: str
    report: MemoryReport | StepProfile

    @property
    def is_measured(self) -> bool:
        """Whether a step was run, rather than estimated."""
        return self.report.settings.method in ("measure", "profile")

    @property
    def low(self) -> int | None:
        """The least that a step takes, or None if unknown."""
        return None if getattr(self.report.settings, "stands_in", False) else self.report.bytes.low


@dataclass(frozen=True)
class PageContents:
    """Results for one page.

    Attributes:
        logs: in brief.
        reports: estimates and profiles.
        title: heading of the page.
    """

    logs: tuple[LogSummary, ...]
    reports: tuple[SavedReport, ...]
    title: str = "Memory report"


def read_report(data: Mapping[str, Any], source: str) -> SavedReport:
    """Read the JSON of an estimate or a profile.

    Args:
        data: the object in the file.
        source: the file's name, for the page and for errors.

    Raises:
        InputError: If a field is missing or of the wrong type, or a size is impossible.
    """
    kind: type[MemoryReport | StepProfile] = StepProfile if data.get("measured") is True else MemoryReport
    try:
        report = kind.from_dict(data)
        _check_sizes("bytes", report.bytes)
        _check_sizes("device", getattr(report, "device", None))
        for layer in report.layers:
            _check_sizes("layers", layer)
    except InputError as error:
        raise InputError(
            f"{source}: no kerasmem estimate or profile: {error}; "
            "write it again: kerasmem estimate MODEL --json > estimate.json"
        ) from error
    return SavedReport(source, report)


def _check_sizes(part: str, record: Any) -> None:
    for name, size in ({} if record is None else vars(record)).items():
        if isinstance(size, int) and not 0 <= size <= _MOST_BYTES:
            raise InputError(f"{part}.{name} must be from 0 to 2**60")
