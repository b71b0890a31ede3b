"""What a logger has found in brief, and how whole the allocators' free memory was, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.devices.health import AllocatorHealth
from kerasmem.monitoring.cost import Overhead
from kerasmem.monitoring.phases import PhasePeaks
from kerasmem.records import Record
from kerasmem.units import format_size


@dataclass(frozen=True)
class EpochHealth:
    """An allocator's health at an epoch's end.

    Attributes:
        run: number of the run, as in `Sample`.
        epoch: Keras's number of the epoch.
        health: what was found.
    """

    run: int
    epoch: int | None
    health: AllocatorHealth

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, in bytes."""
        return {"run": self.run, "epoch": self.epoch, **self.health.to_dict()}


@dataclass(frozen=True)
class LoggerSummary(Record, what="summary", version=1):
    """A logger's findings in brief; sizes in bytes.

    Attributes:
        run_peaks: each device's largest allocator peak in the latest run.
        process_peak: the largest allocator peak since the process began; None where none can be read.
        phases: the largest sizes of each phase over all epochs of the latest run.
        health: each allocator's at the end of each epoch.
        overhead: what the logger itself cost.
        notes: what could not be read and why, and what is out of the ordinary.
    """

    run_peaks: dict[str, int]
    process_peak: int | None
    phases: tuple[PhasePeaks, ...]
    health: tuple[EpochHealth, ...]
    overhead: Overhead
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {**super().to_dict(), "health": [entry.to_dict() for entry in self.health]}


def health_notes(found: Sequence[EpochHealth], run: int, driver: Mapping[str, int]) -> list[str]:
    """Return sentences for people on the end of a run.

    Args:
        found: all readings.
        run: the run.
        driver: bytes in use on each device's card, by all processes, as the driver says.
    """
    said = []
    own = [entry.health for entry in found if entry.run == run]
    for device in dict.fromkeys(health.device for health in own):
        first, *_, last = [health for health in own if health.device == device] * 2
        said += [f"health: {text}" for text in last.explain(driver.get(device))]
        reserved, in_use = last.reserved_bytes - first.reserved_bytes, last.in_use_bytes - first.in_use_bytes
        if reserved > 0 and reserved > 2 * max(in_use, 0):
            said.append(
                f"health: {device}: reserved grew by {format_size(reserved)} from the first epoch's end to the "
                f"last's, in use by {format_size(in_use)}: new memory was taken because what was free did not fit; "
                "it does not go back before the process ends"
            )
    return said
