"""From the size that the estimator says fits to one that was seen to fit, with few tries. Pure.

The estimator's answer is tried first. Where it holds, the sizes above it that are too close to call are halved a few
times; where it does not, the next is on the line through what was estimated, and then what is left is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_TRIES = 6
TOLERANCE = 0.05  # of the size: a try takes a process, so that the last few samples are not worth it


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
    """Return the largest size that was seen to fit, None where none was, and what was tried.

    Where none of the tries fits, the last is the smallest size.

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
        if high is None or (low is not None and high - low <= max(step, int(low * TOLERANCE))):
            break
        floor = minimum - step if low is None else low
        size = max(on_grid((floor + high) // 2), floor + step)
        if low is None and len(trials) == 1:
            size = max(minimum, on_grid(int(high * 0.9)))  # the estimate is seldom far off
        if size >= high:
            break
    return low, tuple(trials)
