"""Where in training host and driver memory peaked: the phases of a run, and the largest sizes in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from kerasmem.records import Record

# "between": data loading, other callbacks, tracing's aftermath; "epoch end": callbacks after the epoch's last batch
PHASES = ("train batch", "validation", "evaluate", "predict", "epoch end", "between")
_SIZES = ("rss_bytes", "tree_bytes", "swap_bytes", "driver_used_bytes")


class BackgroundReading(NamedTuple):
    """One background reading, in bytes; None where a size is not known.

    Attributes:
        rss_bytes: resident in this process.
        tree_bytes: resident in this process and those under it; shared pages count for each.
        high_water_bytes: the largest that this process ever held.
        swap_bytes: what of this process is in swap.
        driver_used_bytes: in use on the fullest card, by all processes.
    """

    rss_bytes: int | None
    tree_bytes: int | None
    high_water_bytes: int | None
    swap_bytes: int | None
    driver_used_bytes: int | None


@dataclass(frozen=True)
class PhasePeaks(Record, what="phase"):
    """The largest sizes that background readings found in one phase of one epoch, in bytes.

    Attributes:
        run: number of the run, as in `Sample`.
        epoch: Keras's number of the epoch; None before the first, and outside `fit`. What callbacks do at an
            epoch's end belongs to that epoch.
        phase: one of `PHASES`; None for a peak between two readings (the kernel keeps the process's largest size,
            but not when that was).
        readings: background readings in this phase.
        rss_bytes: resident in this process.
        tree_bytes: resident in this process and those under it, as PyDataset's workers; shared pages count for each.
        swap_bytes: what of this process was in swap.
        driver_used_bytes: in use on the fullest card, by all processes.
    """

    run: int
    epoch: int | None
    phase: str | None
    readings: int
    rss_bytes: int | None = None
    tree_bytes: int | None = None
    swap_bytes: int | None = None
    driver_used_bytes: int | None = None

    def joined(self, other: PhasePeaks) -> PhasePeaks:
        """Return the larger of each size, and the readings of both."""
        readings = self.readings + other.readings
        sizes = [largest_known((getattr(self, name), getattr(other, name))) for name in _SIZES]
        return PhasePeaks(self.run, self.epoch, self.phase, readings, *sizes)


def over_epochs(peaks: Iterable[PhasePeaks]) -> tuple[PhasePeaks, ...]:
    """Return the largest sizes of each phase, whatever the epoch."""
    found: dict[str | None, PhasePeaks] = {}
    for each in peaks:
        held = found.get(each.phase)
        found[each.phase] = replace(each, epoch=None) if held is None else held.joined(each)
    return tuple(found.values())


class CurrentPhase:
    """The phase that training is in, written by hooks and read by the sampler's thread.

    Attributes:
        phase: now.
        rest: the phase to go back to when a batch has ended.
        changes: how often `phase` was set.
    """

    __slots__ = ("__weakref__", "changes", "phase", "rest")

    def __init__(self) -> None:
        self.phase = self.rest = "between"
        self.changes = 0

    def enter(self, phase: str) -> None:
        """Go into a phase, until another is entered."""
        self.phase = self.rest = phase
        self.changes += 1

    def batch(self, phase: str) -> None:
        """A batch begins."""
        self.phase = phase
        self.changes += 1


class PhaseMaxima:
    """Keeps the largest sizes of each phase, without threads or a clock.

    Examples:
        >>> book = PhaseMaxima()
        >>> book.add("epoch end", BackgroundReading(100, 120, None, 0, None))
        >>> book.cut(run=0, epoch=1)[0].tree_bytes
        120
    """

    def __init__(self) -> None:
        self._peaks: dict[str | None, PhasePeaks] = {}
        self._high_water: int | None = None
        self._last_rss: int | None = None

    def add(self, phase: str, moment: BackgroundReading) -> None:
        """Take in a reading.

        Args:
            phase: that training was in.
            moment: the reading.
        """
        rss, tree, high, swap, used = moment
        self._put(PhasePeaks(0, None, phase, 1, rss, tree, swap, used))
        if high is not None and rss is not None:
            rose = self._high_water is not None and high > self._high_water
            if rose and high > max(rss, self._last_rss or 0):
                self._put(PhasePeaks(0, None, None, 0, high, high + (tree or rss) - rss))
            self._high_water = high
        self._last_rss = rss

    def largest(self, size: str) -> int | None:
        """Return the largest "rss_bytes", "tree_bytes", "swap_bytes" or "driver_used_bytes" since the last cut."""
        return largest_known(getattr(peaks, size) for peaks in self._peaks.values())

    def cut(self, run: int, epoch: int | None) -> list[PhasePeaks]:
        """Return the peaks so far, in the order of `PHASES`, and forget them."""
        order = {phase: place for place, phase in enumerate(PHASES)}
        found = sorted(self._peaks.values(), key=lambda peaks: order.get(peaks.phase or "", len(order)))
        self._peaks = {}
        return [replace(peaks, run=run, epoch=epoch) for peaks in found]

    def _put(self, peaks: PhasePeaks) -> None:
        held = self._peaks.get(peaks.phase)
        self._peaks[peaks.phase] = peaks if held is None else held.joined(peaks)


def largest_known(values: Iterable[int | None]) -> int | None:
    """Return the largest known value, or None if all are unknown."""
    return max((value for value in values if value is not None), default=None)
