"""The largest size that fits a device: a search that asks seldom, since one answer may take a minute. Pure.

Need grows nearly in proportion to a size, so the first questions are on the line through two answers, at least one
tolerance from either end; later ones halve the gap. The search stops if the gap is a small share of the size: a batch
of 3,630 or 3,640 is the same to anyone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.estimation.report import DOES_NOT_FIT, FITS, VERDICTS, Bytes, DeviceVerdict, MemoryReport, verdict
from kerasmem.records import Record
from kerasmem.units import format_size

MOST_EVALUATIONS = 40
TOLERANCE = 0.01  # of the size: below 100 every size is told apart
MOST_ON_THE_LINE = 8  # questions for one end of the interval, before the gap is halved
SECOND = 31  # distance of the second size that is asked about from the smallest
LARGEST = 2**20  # where the search ends if no maximum is given
MOST_TRIES = 6
TRIED_TOLERANCE = 0.05  # of the size: a try takes a process, so that the last few samples are not worth it


@dataclass(frozen=True)
class Evaluation:
    """The bytes that one size needs, and whether it fits."""

    size: int
    total: int
    low: int | None
    high: int | None
    verdict: str


@dataclass(frozen=True)
class Evaluations:
    """All sizes that a search asked about, the smallest first."""

    rows: tuple[Evaluation, ...]

    @property
    def largest(self) -> int | None:
        """The largest size that surely fits: the upper end of its interval does. None if none does."""
        return max((row.size for row in self.rows if row.verdict == FITS), default=None)

    @property
    def above(self) -> list[Evaluation]:
        """The sizes above `largest`: none surely fits."""
        return [row for row in self.rows if row.size > (self.largest or 0)]

    @property
    def fails_from(self) -> int | None:
        """The smallest size above `largest` that surely does not fit, or None. Between the two it is too close."""
        return next((row.size for row in self.above if row.verdict == DOES_NOT_FIT), None)

    @property
    def verdict(self) -> str:
        """Whether any size fits: "fits", "does not fit", or "too close to call"."""
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
    """Narrow down the largest size that fits, between one that fits and a larger one that does not.

    Args:
        fits: whether a size fits.
        guess: from the two ends so far to the next size between them; None ends the search. An end is None if unknown.
        low: a size that fits. Defaults to unknown.
        high: a larger one that does not. Defaults to unknown.
        gap: distance between the two at which the search ends, for a size that fits. Defaults to 1.
        most: maximum number of sizes that are tried.

    Returns:
        Both ends.

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
    """Return the integer below the intersection of the limit with the line through two points."""
    if y1 <= y0:
        return (x0 + x1) // 2 if y1 > limit else 2 * x1
    return x0 + int((limit - y0) * (x1 - x0) // (y1 - y0))


def search(
    ask: Callable[[int], Bytes],
    available_bytes: int,
    *,
    minimum: int = 1,
    maximum: int | None = None,
    step: int = 1,
    tolerance: float = TOLERANCE,
) -> Evaluations:
    """Search for the largest size that surely fits, and for the largest that may fit.

    Args:
        ask: from a size to its need; asked once a size at most.
        available_bytes: bytes available.
        minimum: the smallest size.
        maximum: the largest. Defaults to as large as fits.
        step: only minimum, minimum + step, … are asked.
        tolerance: the share of the size within which the search may stop; 0 searches to the last one.

    Raises:
        UsageError: If the sizes are no range.

    Examples:
        >>> search(lambda n: Bytes(100 + 7 * n, 100 + 7 * n, 100 + 7 * n, *[None] * 7), 1000).largest
        128
    """
    if minimum < 1 or step < 1:
        raise UsageError(f"minimum {minimum}, step {step}: both must be whole numbers from 1")
    top = LARGEST if maximum is None else maximum
    if top < minimum:
        raise UsageError(f"maximum {top} is less than minimum {minimum}")
    asked: dict[int, Bytes] = {}
    last = (top - minimum) // step
    second = min(max(SECOND // step, 1), last)

    def reach(index: int) -> int:
        return max(1, int((minimum + step * index) * tolerance / step))

    def need(end: int, index: int) -> float:
        """Return one end of the interval at an index: 0 for the lower one, 1 for the upper one."""
        if index not in asked:
            asked[index] = ask(minimum + step * index)
        bound = asked[index].bounds[end]
        return math.inf if bound is None else bound

    def fits(end: int, index: int) -> bool:
        return need(end, index) <= available_bytes

    for end in (1, 0):
        high = min((index for index in asked if not fits(end, index)), default=None)
        low = max((index for index in asked if fits(end, index) and (high is None or index < high)), default=None)
        guesses = _line_guesses(partial(need, end), available_bytes, asked, second, last, reach)
        bracket(partial(fits, end), guesses, low=low, high=high, gap=reach, most=MOST_EVALUATIONS - len(asked))
    return Evaluations(
        tuple(
            Evaluation(minimum + step * index, need.total, need.low, need.most_needed, verdict(need, available_bytes))
            for index, need in sorted(asked.items())
        )
    )


def _line_guesses(
    need: Callable[[int], float],
    limit: int,
    asked: Mapping[int, Any],
    second: int,
    last: int,
    reach: Callable[[int], int],
) -> Callable[[int | None, int | None], int | None]:
    """Return a function that guesses the next index from an index that fits and one that does not.

    Args:
        need: bytes at an index.
        limit: bytes available.
        asked: what was asked about so far, by index.
        second: the index to ask about after the first.
        last: the largest index.
        reach: the tolerance at an index.
    """
    on_line = len(asked) + MOST_ON_THE_LINE

    def guess(low: int | None, high: int | None) -> int | None:
        if low is None:
            return 0 if high is None else None
        if high is not None:
            if len(asked) >= on_line:
                return (low + high) // 2
            index = on_the_line(low, need(low), high, need(high), limit)
            beside = high - reach(high - reach(high))  # from which the high end is within its tolerance
            return min(max(index, low + reach(low)), max(beside, low + 1))
        if low == last or low < second:
            return second if low < second else None
        before = max(index for index in asked if index < low)
        beyond = on_the_line(before, need(before), low, need(low), limit)
        least = low + (reach(low) if len(asked) < on_line else low)
        return min(max(beyond, least), 16 * low + 16, last)

    return guess


@dataclass(frozen=True)
class Trial:
    """Real steps at one size.

    Attributes:
        size: that was tried.
        fits: whether all of them ran.
        peak_bytes: the most in use in any of them; None where memory ran out.
        limit_bytes: what TensorFlow's allocator had.
        seconds: the whole process took.
        reason: why it does not fit; None where it does.
    """

    size: int
    fits: bool
    peak_bytes: int | None
    limit_bytes: int
    seconds: float
    reason: str | None = None


def largest_that_ran(
    try_size: Callable[[int], Trial],
    *,
    first: int,
    fails_from: int | None,
    minimum: int = 1,
    maximum: int | None = None,
    step: int = 1,
) -> tuple[int | None, tuple[Trial, ...]]:
    """Return the largest size at which real steps ran, None if none did, and all tries.

    The estimated size comes first. If it runs, the sizes above it that are too close to call are halved a few times; if
    not, the next is a tenth below what failed, and then the rest is halved. If no try fits, the last is the smallest.

    Args:
        try_size: runs real steps; asked once a size.
        first: the size to begin with.
        fails_from: a size that is known not to fit; None where none is.
        minimum: the smallest size; only minimum, minimum + step, … are tried.
        maximum: the largest.
        step: between sizes.

    Examples:
        >>> ran = lambda size: Trial(size, size <= 70, None, 0, 0.0)
        >>> [each.size for each in largest_that_ran(ran, first=64, fails_from=80)[1]]
        [64, 72, 68]
    """
    trials: list[Trial] = []
    ends = [size for size in (fails_from, None if maximum is None else maximum + 1) if size is not None]
    end = -(-(min(ends) - minimum) // step) if ends else None  # sizes are counted in steps from the smallest

    def fits(index: int) -> bool:
        trials.append(try_size(minimum + index * step))
        return trials[-1].fits

    def guess(low: int | None, high: int | None) -> int | None:
        if not trials:
            return (first - minimum) // step
        if high is None or high == 0:
            return None
        if low is None and len(trials) == MOST_TRIES - 1:
            return 0  # whether anything fits at all
        is_near = low is None and len(trials) == 1  # the estimate is seldom far off
        bottom = -1 if low is None else low
        index = max(bottom + 1, int(high * 0.9) if is_near else (bottom + high) // 2)
        return index if index < high else None

    def gap(low: int) -> int:
        return max(1, int((minimum + low * step) * TRIED_TOLERANCE / step))

    low, _ = bracket(fits, guess, high=end, gap=gap, most=MOST_TRIES)
    return None if low is None else minimum + low * step, tuple(trials)


@dataclass(frozen=True)
class SearchResult(Record, what="search", version=1, rows="evaluations"):
    """The largest batch that fits a device.

    Attributes:
        largest: the largest size that surely fits; None where none does.
        fails_from: the smallest above it that surely does not; None where none was found.
        device: that was asked about, with the verdict on the smallest size tried where nothing fits.
        evaluations: every size that was asked, with what it needs.
        report: the estimate at `largest`, or at the smallest size where nothing fits.
        notes: what else a reader should know.
        trials: the sizes at which real steps were run; empty where none were.
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
        """The bytes in use at the peak of a step at `largest`, or at the smallest size where nothing fits."""
        return self.report.peak

    @property
    def answer(self) -> str:
        """The answer: "2GB: batch_size 6,223 fits, needs 1.71 GiB, at most 1.86 GiB, of 1.86 GiB"."""
        device, size = self.device, self.report.settings.batch_size
        outcome = "ran" if self.trials and self.fits else device.verdict
        needs = f"{self.report.needs}, of {format_size(device.available_bytes)}"
        return f"{device.name}: batch_size {size:,} {outcome}, {needs}"
