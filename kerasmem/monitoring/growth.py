"""Does a size grow on and on, or does it settle? Pure arithmetic on a series, one value an iteration.

A leak is told from warm-up, steps and noise by four tests, all of which must hold: the slope (Theil 1950, Sen 1968:
the median of the slopes of all pairs) is above 0 with confidence (Sen's interval, from the variance of Kendall's S
with ties); it goes on in every third of the time, without the two largest jumps (a plateau does not, and
steps are jumps); the size reaches new heights to the end; and all of it is more than the noise about the line.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kerasmem.records import Record

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
