"""What a `MemoryLogger` has found, beside the hooks by which it finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerasmem.monitoring.cost import Overhead
from kerasmem.monitoring.epoch_health import EpochHealth
from kerasmem.monitoring.leak_watch import LeakReport
from kerasmem.monitoring.phases import PhasePeaks, over_epochs
from kerasmem.monitoring.recorder import Recorder
from kerasmem.monitoring.timeline import Timeline
from kerasmem.records import Record


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


class LoggerResults:
    """The results of a recorder as properties."""

    _recorder: Recorder

    @property
    def timeline(self) -> Timeline:
        """All samples so far (the newest `keep` of them), as an immutable copy."""
        return self._recorder.timeline

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read and why, and what is out of the ordinary."""
        return self._recorder.notes

    @property
    def rank(self) -> int | None:
        """This process's number among those that train together, in the latest run; None where it trains alone."""
        worker = self._recorder.worker
        return None if worker is None else worker.rank

    @property
    def run_peaks(self) -> dict[str, int]:
        """Each device's largest allocator peak in the latest run, in bytes, where it can be read.

        The time between batches, and batches that were skipped (`update_freq`), count.
        """
        return self._recorder.peaks[0]

    @property
    def run_peak(self) -> int | None:
        """The largest of `run_peaks`; None where no device's allocator can be read."""
        return max(self.run_peaks.values(), default=None)

    @property
    def process_peak(self) -> int | None:
        """The largest allocator peak since the process began, as TensorFlow would say without the resets."""
        return max(self._recorder.peaks[1].values(), default=None)

    @property
    def phases(self) -> tuple[PhasePeaks, ...]:
        """The largest host and driver sizes of each phase of each epoch, from background readings."""
        return self._recorder.phases

    @property
    def health(self) -> tuple[EpochHealth, ...]:
        """Reserved, largest free block and fragmentation at each epoch's end; empty without `health=True`."""
        return tuple(self._recorder.health)

    @property
    def leaks(self) -> LeakReport | None:
        """Whether memory is kept from epoch to epoch; None without `leaks=True`."""
        watch = self._recorder.leak_watch
        return None if watch is None else watch.report()

    @property
    def overhead(self) -> Overhead:
        """What the logger itself has cost so far: its hooks, and its background thread."""
        return self._recorder.overhead

    @property
    def summary(self) -> LoggerSummary:
        """The findings in brief."""
        latest = over_epochs(each for each in self.phases if each.run == self.phases[-1].run)
        return LoggerSummary(self.run_peaks, self.process_peak, latest, self.health, self.overhead, self.notes)
