"""`kerasmem.LeakWatch`: does a loop keep memory, how much an iteration, and what grows with it."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

from kerasmem.devices.host import held_bytes
from kerasmem.errors import UsageError
from kerasmem.monitoring.evidence import Census, Evidence, compare, take_census
from kerasmem.monitoring.growth import Growth, iterations_to_rise, judge_growth
from kerasmem.monitoring.peaks import running_allocators
from kerasmem.records import Record
from kerasmem.units import format_size

# Bytes an iteration that are worth a word. Keras's own loops were seen to creep by 2 to 6 KiB an iteration on the host
# for some hundred iterations (names, counters, pieces of heap between live objects); allocators count exactly.
_LEAST_OF_HOST, _LEAST = 16384, 4096
# Bytes in all that the host's pages rise by while a young heap fills the holes that its first iterations left: up to
# 300 KiB, all the time, in 150 runs of loops that keep nothing. What rises by less needs a second witness.
_HOLES = 512 * 1024


@dataclass(frozen=True)
class LeakReport(Record, what="leak report", version=1, also=("leaks",)):
    """What a loop keeps.

    Attributes:
        label: of the loop.
        iterations: samples taken.
        growth: for "host" and each device's allocator, such as "GPU:0", what its size does.
        evidence: what grew beside it; None where nothing leaks.
    """

    label: str
    iterations: int
    growth: dict[str, Growth]
    evidence: Evidence | None

    @property
    def leaks(self) -> bool:
        """Whether host or a device's memory grows on and on."""
        return any(growth.verdict == "leak" for growth in self.growth.values())

    @property
    def too_short(self) -> str | None:
        """Why so few iterations say nothing, and how many do; None where there were enough."""
        if not self.growth:
            return "nothing was sampled"
        return next((growth.reason for growth in self.growth.values() if growth.slope is None), None)

    def __str__(self) -> str:
        return "\n".join(self.explain())

    def explain(self) -> tuple[str, ...]:
        """Return sentences for people."""
        said = []
        for where, growth in self.growth.items():
            if growth.verdict == "leak" and growth.slope is not None:
                low, high = format_size(round(growth.low or 0)), format_size(round(growth.high or 0))
                said.append(
                    f"{self.label}: {where} memory grows by {format_size(round(growth.slope))} an iteration "
                    f"({low} to {high} at 99.9 % confidence), by {format_size(growth.rise_bytes)} in the last "
                    f"{growth.values - growth.warm_up} of {growth.values}, after garbage collection"
                )
        if not said:
            undecided = (growth.reason for growth in self.growth.values() if growth.verdict == "undecided")
            reason = self.too_short or next(undecided, None)
            text = f"nothing can be said: {reason}" if reason else "no memory is kept"
            return (f"{self.label}: {text} ({self.iterations} iterations)",)
        if self.evidence is not None:
            said += [f"{self.label}: {text}" for text in self.evidence.explain()]
        return tuple(said)


class LeakWatch:
    """Watches a loop for memory that it keeps: call `sample` at the end of each iteration, then `report`.

    A sample is taken after garbage collection and after free heap has gone back to the system, and takes some tenths
    of a second; where that is too much, sample every tenth iteration. Some 19 samples are needed. Only what a
    warm-up, steps and noise do not explain is called a leak; `report().too_short`, and the report's text, say where the
    loop was too short to decide. On the host, what fits into heap that was freed before
    does not show until that is full; and a rise of less than 512 KiB in all is called a leak only where objects,
    graphs or tracings grow in step with it, else the report says how many iterations tell.

    Args:
        label: of the loop.

    Raises:
        UsageError: the label is no text, or empty.

    Examples:
        >>> watch = LeakWatch("keeps everything")
        >>> kept = []
        >>> for _ in range(24):
        ...     kept.append(bytearray(200_000))
        ...     watch.sample()
        >>> watch.report().leaks
        True
    """

    def __init__(self, label: str = "loop") -> None:
        if not isinstance(label, str) or not label.strip():
            raise UsageError(f"label: {label!r} is no name for a loop; write for example 'predict'")
        self._label = label
        self._series: dict[str, list[int]] = {}
        self._count = 0
        self._censuses: list[Census] = []

    def sample(self, own_bytes: int = 0) -> None:
        """Note what is held now, an iteration being over.

        Args:
            own_bytes: host memory that is meant to grow, such as results that are kept; it is left out.
        """
        gc.collect()
        self._count += 1
        self._note("host", held_bytes() - own_bytes)
        for allocator in running_allocators():
            self._note(allocator.device, allocator.read().in_use_bytes)
        if self._count >= 4 and self._count & (self._count - 1) == 0:  # at 4, 8, 16 …: few, for each takes 100 ms
            self._censuses.append(take_census(self._count))
            self._censuses = self._censuses[-3:]

    def report(self) -> LeakReport:
        """Return what the samples so far say; more may follow."""
        growth = {
            where: judge_growth(values, _LEAST_OF_HOST if where == "host" else _LEAST)
            for where, values in self._series.items()
        }
        evidence = None
        if any(each.verdict == "leak" for each in growth.values()):
            now = take_census(self._count)
            early = [census for census in self._censuses if census.iteration <= self._count / 2]
            if early:
                evidence = compare(early[-1], now)
        if "host" in growth and (evidence is None or not evidence.explain()):
            growth["host"] = without_witness(growth["host"])
        if not any(each.verdict == "leak" for each in growth.values()):
            evidence = None
        return LeakReport(self._label, self._count, growth, evidence)

    def _note(self, where: str, size: int) -> None:
        self._series.setdefault(where, []).append(size)


def without_witness(growth: Growth) -> Growth:
    """Return what a rise of the host's pages says where no objects, graphs or tracings grow in step with it."""
    if growth.verdict != "leak" or growth.rise_bytes >= _HOLES or not growth.slope:
        return growth
    needed = iterations_to_rise(_HOLES, growth.slope)
    reason = (
        f"host memory rose by {format_size(growth.rise_bytes)} in all, as a heap that fills its holes does too, and no "
        f"objects or graphs grow in step; {max(needed, growth.values + 1)} iterations tell"
    )
    return replace(growth, verdict="undecided", reason=reason)
