"""`kerasmem.LeakWatch`: does a loop keep memory, how much an iteration, and what grows with it."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kerasmem.devices.host import held_bytes
from kerasmem.errors import UsageError
from kerasmem.monitoring.device_reader import running_allocators
from kerasmem.monitoring.evidence import Census, Evidence, compare, take_census
from kerasmem.records import Record
from kerasmem.units import format_size

# Bytes an iteration that are worth a word. Keras's own loops were seen to creep by 2 to 6 KiB an iteration on the host
# for some hundred iterations (names, counters, pieces of heap between live objects); allocators count exactly.
_LEAST_OF_HOST, _LEAST = 16384, 4096
# Bytes in all that the host's pages rise by while a young heap fills the holes that its first iterations left: up to
# 300 KiB, all the time, in 150 runs of loops that keep nothing. What rises by less needs a second witness. A loop that
# builds and frees a model each time crept by 60 to 78 KiB a model; the larger the pieces that it frees, the more its
# first steps differ, by some 50 KiB there.
_HOLES = 512 * 1024
_NOISES = 20  # times the noise of the first steps, that a rise needs too


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
        """Reason if there were too few iterations, with the number needed, or None."""
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
    does not show until that is full; and a rise of less than 512 KiB in all, or of less than 20 times the noise of
    the first iterations, is called a leak only where arrays, graphs or tracings grow in step with it, else the report
    says how many iterations tell.

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
        sizes = {"host": held_bytes() - own_bytes}
        sizes |= {allocator.device: allocator.read().in_use_bytes for allocator in running_allocators()}
        for where, size in sizes.items():
            self._series.setdefault(where, []).append(size)
        if self._count >= 4 and self._count & (self._count - 1) == 0:  # at 4, 8, 16 …: few, for each takes 100 ms
            self._censuses.append(take_census(self._count))
            self._censuses = self._censuses[-3:]

    def report(self) -> LeakReport:
        """Judge the samples so far; more may follow."""
        growth = {
            where: judge_growth(values, _LEAST_OF_HOST if where == "host" else _LEAST)
            for where, values in self._series.items()
        }
        evidence = None
        if any(each.verdict == "leak" for each in growth.values()):
            now = take_census(self._count)
            early = [census for census in self._censuses if census.iteration <= self._count / 2]
            if early:
                evidence = compare(early[-1], now, max(each.slope or 0.0 for each in growth.values()))
        if "host" in growth and growth["host"].verdict == "leak" and (evidence is None or not evidence.explain()):
            growth["host"] = without_witness(growth["host"], early_noise(self._series["host"]))
        if not any(each.verdict == "leak" for each in growth.values()):
            evidence = None
        return LeakReport(self._label, self._count, growth, evidence)


def early_noise(series: Sequence[float]) -> float:
    """Return the median deviation of the steps in the warm-up from their median, in bytes.

    Examples:
        >>> early_noise([0, 5, 6, 7, 12, 13])
        0.0
    """
    early = series[: _warm_up(len(series)) + 1]
    steps = [after - before for before, after in itertools.pairwise(early)]
    usual = statistics.median(steps)
    return float(statistics.median(abs(step - usual) for step in steps))


def without_witness(growth: Growth, noise: float = 0.0) -> Growth:
    """Return the verdict on a rise of the host's pages if no arrays, graphs or tracings grow in step with it.

    Args:
        growth: of the host's memory.
        noise: of the first iterations (see `early_noise`).
    """
    least = max(_HOLES, _NOISES * noise)
    if growth.verdict != "leak" or growth.rise_bytes >= least or not growth.slope:
        return growth
    needed = iterations_to_rise(least, growth.slope)
    reason = (
        f"host memory rose by {format_size(growth.rise_bytes)} in all, as a heap that fills its holes does too, and no "
        f"arrays or graphs grow in step; {max(needed, growth.values + 1)} iterations tell"
    )
    return replace(growth, verdict="undecided", reason=reason)


LEAST = 12  # values after the warm-up without which nothing is said
_WARM_UP = 0.25  # of the values, and two more
_QUANTILE = 3.29  # of the normal distribution: 99.9 %, both sides together
_GOES_ON = 0.5  # of the slope over all, that each third's has to have
_MOST = 400  # values that the pairs are made of


@dataclass(frozen=True)
class Growth(Record, what="growth"):
    """What a series does, in bytes an iteration.

    Attributes:
        verdict: "leak", "settled", or "undecided" (too few values).
        slope: after the warm-up; None where undecided.
        low, high: its interval at 99.9 % confidence.
        values: how many there were, the warm-up included.
        warm_up: how many of them were left out at the beginning.
        rise_bytes: slope times iterations after the warm-up.
        reason: why it is so, for people.
    """

    verdict: Literal["leak", "settled", "undecided"]
    slope: float | None
    low: float | None
    high: float | None
    values: int
    warm_up: int
    rise_bytes: int
    reason: str


def judge_growth(series: Sequence[float], least_slope: float = 4096) -> Growth:
    """Return whether a series of sizes in bytes, one an iteration, grows on.

    Args:
        series: the sizes, the oldest first.
        least_slope: bytes an iteration that are worth a word.

    Examples:
        >>> judge_growth([5e6 + 1e5 * n for n in range(30)]).verdict
        'leak'
        >>> judge_growth([5e6 + 3e6 * (1 - 0.8**n) for n in range(30)]).verdict
        'settled'
    """
    warm_up = _warm_up(len(series))
    kept = [float(value) for value in series[warm_up:]]
    count = len(kept)
    if count < LEAST:
        needed = _iterations(LEAST)
        reason = f"{len(series)} iterations are too few; {needed} are enough"
        return Growth("undecided", None, None, None, len(series), min(warm_up, len(series)), 0, reason)
    slope, low, high = theil_sen(kept)

    def result(verdict: Literal["leak", "settled"], reason: str) -> Growth:
        return Growth(verdict, slope, low, high, len(series), warm_up, round(slope * (count - 1)), reason)

    if low <= 0 or slope < least_slope:
        return result("settled", "it does not grow beyond doubt")
    edges = [place * count // 3 for place in range(4)]
    even = _without_jumps(kept)
    thirds = [even[start : min(end + 1, count)] for start, end in zip(edges, edges[1:])]  # noqa: B905, RUF007
    if min(theil_sen(third)[0] for third in thirds) < _GOES_ON * slope:
        return result("settled", "it does not grow all the time: it levels off, or rose in a step")
    heights = [place for place in range(1, count) if kept[place] > max(kept[:place])]
    if len(heights) < count / 3 or sum(place >= edges[2] for place in heights) < (count - edges[2]) / 4:
        return result("settled", "it swings, and rarely comes higher than before")
    middle = statistics.median(value - slope * place for place, value in enumerate(kept))
    noise = statistics.median(abs(value - slope * place - middle) for place, value in enumerate(kept))
    if slope * (count - 1) < 5 * 1.4826 * noise:
        return result("settled", "it grows by no more than it swings")
    return result("leak", "it grows all the time")


def iterations_to_rise(size: float, slope: float) -> int:
    """Return how many iterations a rise by `size` bytes takes at `slope` bytes an iteration, the warm-up included.

    Examples:
        >>> iterations_to_rise(120_000, 10_000)
        20
    """
    return _iterations(math.ceil(size / slope) + 1)


def _warm_up(count: int) -> int:
    return math.ceil(_WARM_UP * count) + 2


def _iterations(judged: int) -> int:
    """Return how many iterations leave so many after the warm-up."""
    return math.ceil((judged + 2) / (1 - _WARM_UP))


def _without_jumps(values: list[float]) -> list[float]:
    """Return the values with the two largest rises made no larger than the median one."""
    rises = [after - before for before, after in zip(values, values[1:])]  # noqa: B905, RUF007
    usual = statistics.median(rises)
    for place in sorted(range(len(rises)), key=rises.__getitem__)[-2:]:
        rises[place] = usual
    return list(itertools.accumulate(rises, initial=values[0]))


def theil_sen(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the Theil-Sen slope, and the ends of Sen's interval at 99.9 % confidence.

    Examples:
        >>> theil_sen([0.0, 2.0, 4.0, 6.0])[0]
        2.0
    """
    count = len(values)
    stride = max(1, math.ceil(count / _MOST))
    places = range(0, count, stride)
    slopes = sorted((values[j] - values[i]) / (j - i) for i in places for j in places if j > i)
    picked = len(places)
    ties = Counter(values[place] for place in places).values()
    variance = (picked * (picked - 1) * (2 * picked + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    reach = _QUANTILE * math.sqrt(max(variance, 0.0))
    lower = max(0, math.floor((len(slopes) - reach) / 2))
    upper = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return statistics.median(slopes), slopes[lower], slopes[upper]
