"""`kerasmem.LeakWatch` detects loops that keep memory, and the objects that grow with it."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kerasmem.devices.host import held_bytes
from kerasmem.errors import UsageError
from kerasmem.monitoring.device_reader import running_allocators
from kerasmem.monitoring.evidence import Census, Evidence, compare, take_census
from kerasmem.records import Record
from kerasmem.units import format_size

# Smallest growth that is reported, in bytes per iteration. On the host, Keras's own loops grow by 2 to 6 KiB per
# iteration for some hundred iterations (names, counters, fragmentation of the heap). Allocators count exactly.
_LEAST_OF_HOST, _LEAST = 16384, 4096
# Loops that keep nothing still raised the host's memory by up to 300 KiB in 150 runs, while a young heap filled the
# holes of its first iterations. A smaller rise is a leak only if arrays or graphs grow in step. A loop that builds and
# frees a model grew by 60 to 78 KiB per model, and its first steps differed by about 50 KiB.
_HOLES = 512 * 1024
_NOISES = 20  # times the noise of the first steps, which a rise must exceed too
_LEAST_VALUES = 12  # after the warm-up, for a verdict
_WARM_UP = 0.25  # of the values, and two more
_QUANTILE = 3.29  # of the normal distribution: 99.9 %, both sides together
_GOES_ON = 0.5  # of the slope over all values, which each third must reach
_MOST_VALUES = 400  # that pairs are formed of


@dataclass(frozen=True)
class LeakReport(Record, what="leak report", version=1, also=("leaks",)):
    """Memory that a loop keeps.

    Attributes:
        label: name of the loop.
        iterations: number of samples.
        growth: growth of "host" and of each device's allocator, such as "GPU:0".
        evidence: objects that grew in step, or None if nothing leaks.
    """

    label: str
    iterations: int
    growth: dict[str, Growth]
    evidence: Evidence | None

    @property
    def leaks(self) -> bool:
        """Whether the host's or a device's memory keeps growing."""
        return _has_leak(self.growth)

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
        sentences = []
        for device, growth in self.growth.items():
            if growth.verdict == "leak" and growth.slope is not None:
                low, high = format_size(round(growth.low or 0)), format_size(round(growth.high or 0))
                sentences.append(
                    f"{self.label}: {device} memory grows by {format_size(round(growth.slope))} per iteration "
                    f"({low} to {high} at 99.9 % confidence), by {format_size(growth.rise_bytes)} in the last "
                    f"{growth.values - growth.warm_up} of {growth.values}, after garbage collection"
                )
        if not sentences:
            undecided = (growth.reason for growth in self.growth.values() if growth.verdict == "undecided")
            reason = self.too_short or next(undecided, None)
            text = f"undecided: {reason}" if reason else "no memory is kept"
            return (f"{self.label}: {text} ({self.iterations} iterations)",)
        if self.evidence is not None:
            sentences += [f"{self.label}: {text}" for text in self.evidence.explain()]
        return tuple(sentences)


class LeakWatch:
    """Detect memory leaks of a loop: call `sample` at the end of each iteration, then `report`.

    Each sample collects garbage and returns free heap to the system first, which takes some tenths of a second. If
    that is too slow, sample every tenth iteration. A decision takes about 19 samples. Growth is a leak if warm-up,
    steps and noise do not explain it. If the loop was too short to decide, `report().too_short` has the reason.

    On the host, new objects may fit into freed heap, so a leak shows only after that is full. A rise by less than
    512 KiB, or by less than 20 times the noise of the first iterations, is a leak only if arrays, graphs or tracings
    grow in step. Otherwise the report has the number of iterations needed.

    Args:
        label: name of the loop. Defaults to "loop".

    Raises:
        UsageError: If the label is empty or not a string.

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
            raise UsageError(f"label must be a name such as 'predict'; got {label!r}.")
        self._label = label
        self._series: dict[str, list[int]] = {}
        self._count = 0
        self._censuses: list[Census] = []

    def sample(self, own_bytes: int = 0) -> None:
        """Record the memory in use after an iteration.

        Args:
            own_bytes: host memory that may grow, such as stored results, to subtract. Defaults to 0.
        """
        gc.collect()
        self._count += 1
        sizes = {"host": held_bytes() - own_bytes}
        sizes |= {allocator.device: allocator.read().in_use_bytes for allocator in running_allocators()}
        for device, size in sizes.items():
            self._series.setdefault(device, []).append(size)
        if self._count >= 4 and self._count & (self._count - 1) == 0:  # at 4, 8, 16 …, since each takes 100 ms
            self._censuses.append(take_census(self._count))
            self._censuses = self._censuses[-3:]

    def report(self) -> LeakReport:
        """Return the report on the samples so far. More may follow."""
        growth = {
            device: judge_growth(values, _LEAST_OF_HOST if device == "host" else _LEAST)
            for device, values in self._series.items()
        }
        evidence = None
        early = [census for census in self._censuses if census.iteration <= self._count / 2]
        if early and _has_leak(growth):
            slope = max(judged.slope or 0.0 for judged in growth.values())
            evidence = compare(early[-1], take_census(self._count), slope)
        if "host" in growth and growth["host"].verdict == "leak" and (evidence is None or not evidence.explain()):
            growth["host"] = without_witness(growth["host"], early_noise(self._series["host"]))
        return LeakReport(self._label, self._count, growth, evidence if _has_leak(growth) else None)


def _has_leak(growth: Mapping[str, Growth]) -> bool:
    return any(judged.verdict == "leak" for judged in growth.values())


def early_noise(series: Sequence[float]) -> float:
    """Return the median absolute deviation of the steps in the warm-up, in bytes.

    Examples:
        >>> early_noise([0, 5, 6, 7, 12, 13])
        2.0
    """
    early = series[: _warm_up(len(series)) + 1]
    steps = [after - before for before, after in itertools.pairwise(early)]
    usual = statistics.median(steps)
    return float(statistics.median(abs(step - usual) for step in steps))


def without_witness(growth: Growth, noise: float = 0.0) -> Growth:
    """Return the verdict on a rise of host memory if no arrays, graphs or tracings grow in step.

    Args:
        growth: growth of the host's memory.
        noise: noise of the first iterations (see `early_noise`).
    """
    least = max(_HOLES, _NOISES * noise)
    if growth.verdict != "leak" or growth.rise_bytes >= least or not growth.slope:
        return growth
    needed = _iterations(math.ceil(least / growth.slope) + 1)
    reason = (
        f"host memory rose by only {format_size(growth.rise_bytes)}, and no arrays or graphs grow in step; "
        f"run {max(needed, growth.values + 1)} iterations"
    )
    return replace(growth, verdict="undecided", reason=reason)


@dataclass(frozen=True)
class Growth(Record, what="growth"):
    """Growth of a series, in bytes per iteration.

    Attributes:
        verdict: "leak", "settled", or "undecided" (too few values).
        slope: slope after the warm-up, or None if undecided.
        low, high: confidence interval of the slope at 99.9 %.
        values: number of values, including the warm-up.
        warm_up: number of values left out at the start.
        rise_bytes: slope times iterations after the warm-up.
        reason: reason for the verdict, for people.
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
    """Judge whether a series of sizes keeps growing.

    Args:
        series: sizes in bytes, one per iteration, the oldest first.
        least_slope: smallest growth that is a leak, in bytes per iteration. Defaults to 4096.

    Examples:
        >>> judge_growth([5e6 + 1e5 * n for n in range(30)]).verdict
        'leak'
        >>> judge_growth([5e6 + 3e6 * (1 - 0.8**n) for n in range(30)]).verdict
        'settled'
    """
    warm_up = _warm_up(len(series))
    values = [float(value) for value in series[warm_up:]]
    if len(values) < _LEAST_VALUES:
        reason = f"{len(series)} iterations are too few; run {_iterations(_LEAST_VALUES)}"
        return Growth("undecided", None, None, None, len(series), min(warm_up, len(series)), 0, reason)
    slope, low, high = theil_sen(values)
    rise = slope * (len(values) - 1)
    objection = "it does not grow significantly" if low <= 0 or slope < least_slope else _objection(values, slope)
    verdict: Literal["leak", "settled"] = "settled" if objection else "leak"
    return Growth(verdict, slope, low, high, len(series), warm_up, round(rise), objection or "it keeps growing")


def _objection(values: list[float], slope: float) -> str | None:
    """Return the reason why values that have grown do not keep growing, or None if they do."""
    count = len(values)
    edges = [number * count // 3 for number in range(4)]
    even = _without_jumps(values)
    if min(theil_sen(even[start : end + 1])[0] for start, end in itertools.pairwise(edges)) < _GOES_ON * slope:
        return "it does not keep growing: it levels off, or rose in a step"
    maxima = [n for n in range(1, count) if values[n] > max(values[:n])]
    if len(maxima) < count / 3 or sum(n >= edges[2] for n in maxima) < (count - edges[2]) / 4:
        return "it fluctuates, and rarely reaches a new maximum"
    middle = statistics.median(value - slope * n for n, value in enumerate(values))
    noise = statistics.median(abs(value - slope * n - middle) for n, value in enumerate(values))
    return "it grows by no more than it fluctuates" if slope * (count - 1) < 5 * 1.4826 * noise else None


def _warm_up(count: int) -> int:
    return math.ceil(_WARM_UP * count) + 2


def _iterations(judged: int) -> int:
    """Return the number of iterations, warm-up included, that leaves `judged` iterations after it."""
    return math.ceil((judged + 2) / (1 - _WARM_UP))


def _without_jumps(values: list[float]) -> list[float]:
    """Replace the two largest rises by the median one."""
    rises = [after - before for before, after in itertools.pairwise(values)]
    usual = statistics.median(rises)
    for number in sorted(range(len(rises)), key=rises.__getitem__)[-2:]:
        rises[number] = usual
    return list(itertools.accumulate(rises, initial=values[0]))


def theil_sen(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the Theil-Sen slope and its interval at 99.9 % confidence.

    Examples:
        >>> theil_sen([0.0, 2.0, 4.0, 6.0])[0]
        2.0
    """
    count = len(values)
    stride = max(1, math.ceil(count / _MOST_VALUES))
    chosen = range(0, count, stride)
    slopes = sorted((values[j] - values[i]) / (j - i) for i in chosen for j in chosen if j > i)
    n = len(chosen)
    ties = Counter(values[i] for i in chosen).values()
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    reach = _QUANTILE * math.sqrt(max(variance, 0.0))
    lower = max(0, math.floor((len(slopes) - reach) / 2))
    upper = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return statistics.median(slopes), slopes[lower], slopes[upper]
