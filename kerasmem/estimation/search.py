"""The largest size that fits a device: a search that asks seldom, since one answer may take a minute. Pure.

Need grows nearly in proportion to a size, so the first guess is on the line through two answers, and each further one
on the line through the answers on either side of the limit. Where the line led, the limit is close: the next question
is as far beyond as the answer may be off, and mostly the last. Where the line does not halve what is left, the middle
is asked from then on. The search stops where what is left is a small share of the size: a batch of 3,630 or 3,640 is
the same to anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kerasmem.errors import UsageError
from kerasmem.estimation.report import FORMAT_VERSION, Bytes, DeviceVerdict, MemoryReport
from kerasmem.estimation.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE, at_least, at_most, verdict
from kerasmem.records import Record
from kerasmem.units import format_size

MOST_EVALUATIONS = 40
TOLERANCE = 0.01  # of the size: below 100 every size is told apart
MOST_SLOW = 2  # steps on the line that do not halve what is left, before the middle is asked for good
LARGEST = 2**20  # where the search ends if no maximum is given
MOST_TRIES = 6
TRIED_TOLERANCE = 0.05  # of the size: a try takes a process, so that the last few samples are not worth it


@dataclass(frozen=True)
class Evaluation:
    """What one size needs, in bytes, and whether that fits."""

    size: int
    total: int
    low: int | None
    high: int | None
    verdict: str


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        largest: the largest size that surely fits (the upper end of what it needs does); None where none did.
        fails_from: the smallest size above it that surely does not fit; None where none was found. What lies between
            the two is too close to call.
        is_exact: the next size after `largest` was asked as well and does not surely fit, or is beyond the maximum.
        next_asked: the next larger size that was asked and does not surely fit; None where there is none.
        is_steady: no size was found that fits although a smaller one does not.
        evaluations: all that was asked, by size.
    """

    largest: int | None
    fails_from: int | None
    is_exact: bool
    next_asked: int | None
    is_steady: bool
    evaluations: tuple[Evaluation, ...]

    @property
    def verdict(self) -> str:
        """Whether any size fits: "fits", "does not fit", or "too close to call"."""
        if self.largest is not None:
            return FITS
        return DOES_NOT_FIT if all(each.verdict == DOES_NOT_FIT for each in self.evaluations) else TOO_CLOSE


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


def on_the_line(x0: int, y0: int, x1: int, y1: int, limit: int) -> int:
    """Return the integer below the intersection of the limit with the line through two points."""
    if y1 <= y0:
        return (x0 + x1) // 2 if y1 > limit else 2 * x1
    return x0 + (limit - y0) * (x1 - x0) // (y1 - y0)


def search(
    ask: Callable[[int], Bytes],
    available_bytes: int,
    *,
    minimum: int = 1,
    maximum: int | None = None,
    step: int = 1,
    guess: int = 32,
    tolerance: float = TOLERANCE,
) -> Found:
    """Return the largest size that fits.

    Args:
        ask: from a size to its need; asked once a size at most.
        available_bytes: bytes available.
        minimum: the smallest size.
        maximum: the largest. Defaults to as large as fits.
        step: only minimum, minimum + step, … are asked.
        guess: the second size that is asked, after the smallest.
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

    def need(index: int) -> Bytes:
        if index not in asked:
            asked[index] = ask(minimum + step * index)
        return asked[index]

    def need_at(end: Callable[[Bytes], int], index: int) -> int:
        return end(need(index))

    def is_judged(verdicts: tuple[str, ...], index: int) -> bool:
        return verdict(need(index), available_bytes) in verdicts

    def reach(index: int) -> int:
        return max(1, int((minimum + step * index) * tolerance / step))

    second = min(max((guess - minimum) // step, 1), last)
    if not is_judged((FITS,), 0):
        second = min(second, 1)  # it will hardly get better: look only whether the next says so too
    ends: tuple[tuple[tuple[str, ...], Callable[[Bytes], int]], ...]
    ends = ((FITS,), at_most), ((FITS, TOO_CLOSE), at_least)
    for verdicts, end in ends:
        low, high = _known_ends({index: is_judged(verdicts, index) for index in asked})
        guesses = _LineGuess(partial(need_at, end), available_bytes, second, last, reach)
        most = MOST_EVALUATIONS - len(asked)
        bracket(partial(is_judged, verdicts), guesses, low=low, high=high, gap=reach, most=most)
    return _found(asked, available_bytes, minimum, step, last)


def _known_ends(fits: Mapping[int, bool]) -> tuple[int | None, int | None]:
    """Return the smallest index that does not fit, after the largest below it that does; None if there is none."""
    high = min((index for index in fits if not fits[index]), default=None)
    low = max((index for index in fits if fits[index] and (high is None or index < high)), default=None)
    return low, high


class _LineGuess:
    """Guesses on the line through the needs at both ends.

    If two guesses do not halve the gap, it halves it itself from then on. Next to an index that the line led to, it
    guesses one tolerance beyond, which mostly ends the search.

    Args:
        need: bytes at an index.
        limit: bytes available.
        second: the guess after the first index.
        last: the largest index.
        reach: tolerance at an index.
    """

    def __init__(
        self, need: Callable[[int], int], limit: int, second: int, last: int, reach: Callable[[int], int]
    ) -> None:
        self._need, self._limit, self._second, self._last, self._reach = need, limit, second, last, reach
        self._is_rough = reach(last) > 1
        self._short = self._slow = 0  # extrapolations that fell short, steps that did not halve the gap
        self._latest: int | None = None  # the index that the line led to last
        self._gap: int | None = None

    def __call__(self, low: int | None, high: int | None) -> int | None:
        if low is None or low == self._last:
            return None
        if high is None:
            self._latest = min(self._beyond(low), self._last)
        elif (beside := self._beside(low, high)) is not None:
            self._latest = None
            return beside
        else:
            self._latest = self._between(low, high)
        return self._latest

    def _beyond(self, low: int) -> int:
        """Return an index on the line through the smallest and the largest, at most sixteen times as far."""
        if low == 0 and low < self._second:
            return self._second
        index = on_the_line(0, self._need(0), low, self._need(low), self._limit) + 1
        further = (1, self._reach(low) if self._is_rough else low, low)[min(self._short, 2)]
        index = min(max(index, low + further), 16 * low + 16)
        self._short += index - low < 16 * self._reach(low) or not self._is_rough
        return index

    def _beside(self, low: int, high: int) -> int | None:
        beside = {low: low + self._reach(low), high: high - self._reach(high - self._reach(high))}
        if self._latest not in beside or not self._is_rough:
            return None
        return min(max(beside[self._latest], low + 1), high - 1)

    def _between(self, low: int, high: int) -> int:
        self._slow += self._gap is not None and high - low > self._gap // 2
        self._gap = high - low
        if self._slow >= MOST_SLOW:
            return (low + high) // 2
        index = on_the_line(low, self._need(low), high, self._need(high), self._limit)
        return min(max(index, low + 1), high - 1)


def _found(asked: Mapping[int, Bytes], available_bytes: int, minimum: int, step: int, last: int) -> Found:
    evaluations = tuple(
        Evaluation(minimum + step * index, need.total, need.low, need.high, verdict(need, available_bytes))
        for index, need in sorted(asked.items())
    )
    largest = max((each.size for each in evaluations if each.verdict == FITS), default=None)
    above = [each for each in evaluations if largest is None or each.size > largest]
    below = [each for each in evaluations if largest is not None and each.size < largest]
    next_asked = above[0].size if above and largest is not None else None
    return Found(
        largest=largest,
        fails_from=next((each.size for each in above if each.verdict == DOES_NOT_FIT), None),
        is_exact=largest in (None, minimum + step * last) or next_asked == (largest or 0) + step,
        next_asked=next_asked,
        is_steady=all(each.verdict == FITS for each in below),
        evaluations=evaluations,
    )


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

    def on_grid(size: int) -> int:
        return minimum + max(0, size - minimum) // step * step

    def fits(size: int) -> bool:
        trials.append(try_size(size))
        return trials[-1].fits

    def guess(low: int | None, high: int | None) -> int | None:
        if not trials:
            return on_grid(first)
        if high is None or high == minimum:
            return None
        if low is None and len(trials) == MOST_TRIES - 1:
            return minimum  # whether anything fits at all
        floor = minimum - step if low is None else low
        size = max(on_grid((floor + high) // 2), floor + step)
        if low is None and len(trials) == 1:
            size = max(minimum, on_grid(int(high * 0.9)))  # the estimate is seldom far off
        return size if size < high else None

    ends = [] if maximum is None else [on_grid(maximum) + step]
    high = min([*ends, *([] if fails_from is None else [fails_from])], default=None)
    low, _ = bracket(fits, guess, high=high, gap=lambda low: max(step, int(low * TRIED_TOLERANCE)), most=MOST_TRIES)
    return low, tuple(trials)


@dataclass(frozen=True)
class SearchResult(Record, what="search", version=FORMAT_VERSION, rows="evaluations"):
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
        """The answer: "batch_size 6,223 fits 2GB: needs 1.71 GiB, at most 1.86 GiB, of 1.86 GiB"."""
        did = "ran on" if self.trials and self.fits else self.device.verdict
        joined = " on" if self.device.verdict == TOO_CLOSE else ""
        room = format_size(self.device.available_bytes)
        size = self.report.settings.batch_size
        return f"batch_size {size:,} {did}{joined} {self.device.name}: {self.report.needs}, of {room}"
