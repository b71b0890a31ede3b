"""Search for the largest size that fits a device, with few evaluations.

One evaluation may take a minute. Memory grows nearly in proportion to a size. So the first guesses are on the line
through two evaluated sizes, at least one tolerance from either end. Later ones halve the gap. The search ends when the
gap is a small share of the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from kerasmem.estimation.report import DOES_NOT_FIT, FITS, VERDICTS, Bytes, DeviceVerdict, MemoryReport, verdict
from kerasmem.records import Record

MOST_EVALUATIONS = 40
TOLERANCE = 0.01  # of the size
MOST_ON_THE_LINE = 8  # guesses for one end of the interval, before the gap is halved
SECOND = 32  # the size that is evaluated after 1
LARGEST = 2**20  # default maximum
MOST_TRIES = 6
TRIED_TOLERANCE = 0.05  # of the size: a try takes a process, which the last few samples are not worth


@dataclass(frozen=True)
class Evaluation:
    """The estimate for one batch size.

    Attributes:
        size: samples in a batch.
        total: predicted peak in bytes.
        low: lower end of the estimate in bytes, or None if unknown.
        high: upper end in bytes, or None if unknown.
        verdict: "fits", "does not fit" or "too close to call".
    """

    size: int
    total: int
    low: int | None
    high: int | None
    verdict: str


@dataclass(frozen=True)
class Evaluations:
    """All evaluated sizes, the smallest first."""

    rows: tuple[Evaluation, ...]

    @property
    def largest(self) -> int | None:
        """The largest size that surely fits, or None."""
        return max((row.size for row in self.rows if row.verdict == FITS), default=None)

    @property
    def above(self) -> list[Evaluation]:
        """The evaluated sizes above `largest`."""
        return [row for row in self.rows if row.size > (self.largest or 0)]

    @property
    def fails_from(self) -> int | None:
        """The smallest size above `largest` that surely does not fit, or None."""
        return next((row.size for row in self.above if row.verdict == DOES_NOT_FIT), None)

    @property
    def verdict(self) -> str:
        """The best verdict of any size."""
        return min((row.verdict for row in self.rows), key=VERDICTS.index)


def bracket(
    fits: Callable[[int], bool],
    guess: Callable[[int | None, int | None], int | None],
    *,
    low: int | None = None,
    high: int | None = None,
    gap: Callable[[int], int] = lambda low: 1,
    most: int = MOST_EVALUATIONS,
) -> tuple[int | None, int | None]:
    """Narrow the gap between a size that fits and one that does not.

    Args:
        fits: returns whether a size fits.
        guess: returns the next size between both ends (None if unknown), or None to end the search.
        low: a size that fits. Defaults to unknown.
        high: a larger size that does not fit. Defaults to unknown.
        gap: returns the distance between both ends at which the search ends, for a size that fits. Defaults to 1.
        most: maximum number of tried sizes. Defaults to 40.

    Returns:
        The two ends.

    Examples:
        >>> bracket(lambda size: size <= 70, lambda low, high: (low + high) // 2, low=1, high=128)
        (70, 71)
    """
    for _ in range(most):
        if low is not None and high is not None and high - low <= gap(low):
            break
        size = guess(low, high)
        if size is None:
            break
        if fits(size):
            low = size
        else:
            high = size
    return low, high


def on_the_line(x0: int, y0: float, x1: int, y1: float, limit: int) -> int:
    """Return the intersection of a line through two points with `limit`, rounded down."""
    if y1 <= y0:
        return (x0 + x1) // 2 if y1 > limit else 2 * x1
    return x0 + int((limit - y0) * (x1 - x0) // (y1 - y0))


def search(
    evaluate: Callable[[int], Bytes],
    available_bytes: int,
    *,
    highest: int | None = None,
    maximum: int | None = None,
    tolerance: float = TOLERANCE,
    unit: int = 1,
    grows_from_below: bool = True,
) -> Evaluations:
    """Search for the largest size that surely fits, and that may fit.

    Args:
        evaluate: returns the bytes of a size; called at most once a size.
        available_bytes: bytes available, or their lowest number.
        highest: highest number of available bytes, for the lower end. Defaults to `available_bytes`.
        maximum: upper limit of the search, at least the unit. Defaults to 2 ** 20.
        tolerance: distance at which the search may end, as a share of the size. Defaults to 0.01.
        unit: number that divides every size. Defaults to 1.
        grows_from_below: whether the lower end grows with the peak. Otherwise only the upper end is searched, as sizes
            far above the memory would have to be evaluated for the lower one. Defaults to True.

    Examples:
        >>> search(lambda n: Bytes(100 + 7 * n, 100 + 7 * n, 100 + 7 * n, *[None] * 7), 1000).largest
        128
    """
    needs: dict[int, Bytes] = {}  # by size, in units

    def bound_of(end: int, units: int) -> float:
        """Return the lower (0) or upper (1) end of a size's interval."""
        if units not in needs:
            needs[units] = evaluate(units * unit)
        bound = needs[units].bounds[end]
        return math.inf if bound is None else bound

    largest = (LARGEST if maximum is None else maximum) // unit
    limits = available_bytes if highest is None else highest, available_bytes
    for end in (1, 0) if grows_from_below else (1,):
        _narrow(partial(bound_of, end), limits[end], needs, largest, tolerance)
    return Evaluations(
        tuple(
            Evaluation(units * unit, need.total, need.low, need.most_needed, verdict(need, available_bytes, highest))
            for units, need in sorted(needs.items())
        )
    )


def _narrow(
    need: Callable[[int], float], limit: int, evaluated: Collection[int], largest: int, tolerance: float
) -> None:
    """Find the largest fitting size to within the tolerance.

    Args:
        need: returns the bytes that a size needs.
        limit: bytes available.
        evaluated: the sizes so far.
        largest: upper limit of the search.
        tolerance: distance at which the search may end, as a share of the size.
    """
    on_line = len(evaluated) + MOST_ON_THE_LINE

    def reach(size: int) -> int:
        return max(1, int(size * tolerance))

    def guess(low: int | None, high: int | None) -> int | None:
        if low is None:
            return 1 if high is None else None
        if high is not None:
            if len(evaluated) >= on_line:
                return (low + high) // 2
            size = on_the_line(low, need(low), high, need(high), limit)
            beside = high - reach(high - reach(high))  # within its tolerance of the high end
            return min(max(size, low + reach(low)), max(beside, low + 1))
        if low == largest or low < SECOND:
            return min(SECOND, largest) if low < largest else None
        before = max(size for size in evaluated if size < low)
        beyond = on_the_line(before, need(before), low, need(low), limit)
        least = low + (reach(low) if len(evaluated) < on_line else low)
        return min(max(beyond, least), 16 * low, largest)

    high = min((size for size in evaluated if need(size) > limit), default=None)
    low = max((size for size in evaluated if need(size) <= limit and (high is None or size < high)), default=None)
    most = MOST_EVALUATIONS - len(evaluated)
    bracket(lambda size: need(size) <= limit, guess, low=low, high=high, gap=reach, most=most)


@dataclass(frozen=True)
class Trial:
    """Real steps at one size.

    Attributes:
        size: the tried size.
        fits: whether all steps ran.
        peak_bytes: the highest peak of the steps, or None if memory ran out.
        limit_bytes: limit of TensorFlow's allocator.
        reason: why the size does not fit, or None.
    """

    size: int
    fits: bool
    peak_bytes: int | None
    limit_bytes: int
    reason: str | None = None


def largest_that_ran(
    try_size: Callable[[int], Trial], first: int, fails_from: int | None
) -> tuple[int | None, tuple[Trial, ...]]:
    """Return the largest size that ran, or None, and all tries.

    The estimated size comes first. If it runs, the gap to `fails_from` is halved a few times. If it fails, the next
    size is a tenth smaller, and then the rest is halved. If no try fits, the last is of size 1.

    Args:
        try_size: runs real steps; called once a size.
        first: the estimated size.
        fails_from: a size that is too large, or None if unknown.

    Examples:
        >>> ran = lambda size: Trial(size, size <= 70, None, 0)
        >>> [trial.size for trial in largest_that_ran(ran, first=64, fails_from=80)[1]]
        [64, 72, 68, 70]
    """
    trials: list[Trial] = []

    def fits(size: int) -> bool:
        trials.append(try_size(size))
        return trials[-1].fits

    def guess(low: int | None, high: int | None) -> int | None:
        if not trials:
            return first
        if high is None or high == 1:
            return None
        if low is None and len(trials) == MOST_TRIES - 1:
            return 1  # whether anything fits at all
        is_near = low is None and len(trials) == 1  # the estimate is seldom far off
        fitting = low or 0
        size = max(fitting + 1, int(high * 0.9) if is_near else (fitting + high) // 2)
        return size if size < high else None

    def gap(low: int) -> int:
        return max(1, int(low * TRIED_TOLERANCE))

    largest, _ = bracket(fits, guess, high=fails_from, gap=gap, most=MOST_TRIES)
    return largest, tuple(trials)


@dataclass(frozen=True)
class SearchResult(Record, what="search", version=1, rows="evaluations"):
    """The largest batch that fits a device.

    Attributes:
        largest: the largest size that surely fits (with `confirm`: ran), or None.
        fails_from: the smallest size above it that surely does not fit, or None.
        device: the device. If nothing fits, its verdict is on the smallest size.
        evaluations: every estimated size and its bytes.
        report: the estimate at `largest`, or at the smallest size if nothing fits.
        notes: remarks on the search.
        trials: sizes at which real steps ran or failed; empty without `confirm`.
    """

    largest: int | None
    fails_from: int | None
    device: DeviceVerdict
    evaluations: tuple[Evaluation, ...]
    report: MemoryReport
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a size surely fits, or ran."""
        return self.device.fits

    @property
    def peak(self) -> int:
        """The peak of a step at `largest`, or at 1 if nothing fits."""
        return self.report.peak

    @property
    def answer(self) -> str:
        """A summary: "2GB: batch_size 6,223 fits, needs 1.71 GiB, at most 1.86 GiB, of 1.86 GiB"."""
        device, size = self.device, self.report.settings.batch_size
        outcome = "ran" if self.trials and self.fits else device.verdict
        needs = f"{self.report.needs}, of {device.available}"
        return f"{device.name}: batch_size {size:,} {outcome}, {needs}"
