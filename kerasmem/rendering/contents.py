"""Contents of a report: logs, and saved estimates and profiles under the names of their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kerasmem.errors import InputError
from kerasmem.estimation.report import DeviceVerdict, MemoryReport
from kerasmem.monitoring.log_summary import LogSummary
from kerasmem.profiling.results import StepProfile

_MOST_BYTES = 2**60  # beyond any memory; a chart cannot scale more


@dataclass(frozen=True)
class SavedReport:
    """An estimate, measurement or profile, and the file it comes from; sizes in bytes."""

    source: str
    report: MemoryReport | StepProfile

    @property
    def is_measured(self) -> bool:
        """Whether a step was run, rather than estimated."""
        return isinstance(self.report, StepProfile) or self.report.settings.method == "measure"

    @property
    def device(self) -> DeviceVerdict | None:
        """The device that was named, with the verdict."""
        return None if isinstance(self.report, StepProfile) else self.report.device

    @property
    def total(self) -> int:
        """The peak."""
        return self.report.bytes.total

    @property
    def high(self) -> int | None:
        """The upper end of the interval that the method claims."""
        return self.report.bytes.high

    @property
    def lower_end(self) -> int | None:
        """The least that a step takes, or None if unknown."""
        return None if getattr(self.report.settings, "stands_in", False) else self.report.bytes.low

    @property
    def categories(self) -> dict[str, int]:
        """The parts of the peak that hold something."""
        parts = {name: getattr(self.report.bytes, name) for name in self.report.bytes.CATEGORIES}
        return {name: size for name, size in parts.items() if size}

    @property
    def is_at_peak(self) -> bool:
        """Whether `layers` are sizes at the peak, rather than shares of the total."""
        return any(layer.bytes_at_peak is not None for layer in self.report.layers)

    @property
    def layers(self) -> dict[str, int]:
        """The layers that hold something, the largest first."""
        name = "bytes_at_peak" if self.is_at_peak else "bytes"
        sizes = {layer.name: getattr(layer, name) or 0 for layer in self.report.layers}
        return dict(sorted(((name, size) for name, size in sizes.items() if size), key=lambda pair: -pair[1]))


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

    @property
    def estimates(self) -> tuple[SavedReport, ...]:
        """Reports that were estimated."""
        return tuple(report for report in self.reports if not report.is_measured)

    @property
    def measured(self) -> tuple[SavedReport, ...]:
        """Reports of steps that were run."""
        return tuple(report for report in self.reports if report.is_measured)


def is_report(data: object) -> bool:
    """Return whether JSON data looks like an estimate or a profile."""
    return isinstance(data, dict) and "bytes" in data and "kind" not in data


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
        for name, size in _sizes(report):
            if size is not None and not 0 <= size <= _MOST_BYTES:
                raise InputError(f"{name} must be from 0 to 2**60")
    except InputError as error:
        raise InputError(
            f"{source}: no kerasmem estimate or profile: {error}; "
            "write it again: kerasmem estimate MODEL --json > estimate.json"
        ) from error
    return SavedReport(source, report)


def _sizes(report: MemoryReport | StepProfile) -> Iterator[tuple[str, int | None]]:
    for name in ("total", "low", "high", *report.bytes.CATEGORIES):
        yield f"bytes.{name}", getattr(report.bytes, name)
    for layer in report.layers:
        yield "layers.bytes", layer.bytes
        yield "layers.bytes_at_peak", layer.bytes_at_peak
    if isinstance(report, MemoryReport) and report.device is not None:
        yield "device.available_bytes", report.device.available_bytes
