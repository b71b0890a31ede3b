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
        ask: from a size to what it needs; asked once a size at most.
        available_bytes: what there is.
        minimum: the smallest size.
        maximum: the largest; None: as large as fits.
        step: only minimum, minimum + step, … are asked.
        guess: the second size that is asked, after the smallest.
        tolerance: the share of the size within which the search may stop; 0 searches to the last one.

    Raises:
        UsageError: the sizes are no range.

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

    def does_not_surely_fit(index: int) -> bool:
        return verdict(need(index), available_bytes) != FITS

    def surely_fails(index: int) -> bool:
        return verdict(need(index), available_bytes) == DOES_NOT_FIT

    second = min(max((guess - minimum) // step, 1), last)
    if does_not_surely_fit(0):
        second = min(second, 1)  # it will hardly get better: look only whether the next says so too

    def reach(index: int) -> int:
        return max(1, int((minimum + step * index) * tolerance / step))

    _first_true(does_not_surely_fit, lambda index: at_most(need(index)), available_bytes, second, last, asked, reach)
    if any(not surely_fails(index) for index in list(asked)):
        _first_true(surely_fails, lambda index: at_least(need(index)), available_bytes, second, last, asked, reach)
    return _found(asked, available_bytes, minimum, step, last)


def _first_true(
    holds: Callable[[int], bool],
    bytes_of: Callable[[int], int],
    limit: int,
    second: int,
    last: int,
    asked: Mapping[int, Bytes],
    reach: Callable[[int], int],
) -> None:
    """Ask until the first index that holds is within reach of one that does not, or there is none."""
    holds(0)
    is_rough = reach(last) > 1
    width: int | None = None
    short = slow = 0  # extrapolations that fell short, steps that did not halve what is left
    latest: int | None = None  # the index that the line led to last, from which a step as far as the reach may end it
    while len(asked) < MOST_EVALUATIONS:
        true = min((index for index in asked if holds(index)), default=None)
        false = max((index for index in asked if not holds(index) and (true is None or index < true)), default=None)
        if false is None:  # the smallest does not hold out
            return
        if true is None:
            if false == last:
                return
            if false < second and len(asked) == 1:
                index = second
            else:  # on the line through the smallest and the largest, at most sixteen times as far
                index = _on_the_line(0, bytes_of(0), false, bytes_of(false), limit) + 1
                further = (1, reach(false) if is_rough else false, false)[min(short, 2)]
                index = min(max(index, false + further), 16 * false + 16)
                short += index - false < 16 * reach(false) or not is_rough
            latest = min(index, last)
            holds(latest)
            continue
        if true - false <= reach(false):
            return
        beside = {false: false + reach(false), true: true - reach(true - reach(true))}
        if latest in beside and is_rough:
            holds(min(max(beside[latest], false + 1), true - 1))
            latest = None
            continue
        slow += width is not None and true - false > width // 2
        width = true - false
        index = _on_the_line(false, bytes_of(false), true, bytes_of(true), limit)
        latest = (true + false) // 2 if slow >= MOST_SLOW else min(max(index, false + 1), true - 1)
        holds(latest)


def _on_the_line(x0: int, y0: int, x1: int, y1: int, limit: int) -> int:
    """Return the integer below the intersection of the limit with the line through two points."""
    if y1 <= y0:
        return (x0 + x1) // 2 if y1 > limit else 2 * x1
    return x0 + (limit - y0) * (x1 - x0) // (y1 - y0)


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

    low: int | None = None
    high = fails_from
    if maximum is not None:
        beyond = on_grid(maximum) + step
        high = beyond if high is None else min(high, beyond)
    size = on_grid(first)
    while len(trials) < MOST_TRIES:
        if low is None and trials and len(trials) == MOST_TRIES - 1:
            size = minimum  # whether anything fits at all
        trials.append(try_size(size))
        if trials[-1].fits:
            low = size
        else:
            high = size
            if size == minimum:
                break
        if high is None or (low is not None and high - low <= max(step, int(low * TRIED_TOLERANCE))):
            break
        floor = minimum - step if low is None else low
        size = max(on_grid((floor + high) // 2), floor + step)
        if low is None and len(trials) == 1:
            size = max(minimum, on_grid(int(high * 0.9)))  # the estimate is seldom far off
        if size >= high:
            break
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
