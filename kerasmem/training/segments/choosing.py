"""Where to cut a chain: the lowest peak, or the least time within a target. Pure arithmetic.

In the backward pass of a segment there are in memory: what every segment before it holds, its own inside, the
gradient that comes from above, and scratch. A recomputed segment holds the tensors that cross its end; a kept one its
whole inside. So the state of a partition is what is held at a place, and everything after it depends on that number
alone: dynamic programming over the places, with the time spent as the second coordinate if a target is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kerasmem.training.segments.chain import Step, nested_models

Cut = tuple[int, bool]  # the number of steps before the end of a segment, and whether the segment is recomputed
MOST_PLACES = 256  # beyond it, in each of so many stretches of the chain the one where least crosses is looked at
MOST_LABELS = 64  # partitions remembered at a place
_CLOSE = 1e-3


@dataclass(frozen=True)
class Table:
    """The cost of a segment between each pair of places.

    Attributes:
        places: how many steps lie before each.
        held: bytes that a recomputed segment leaves behind, [begin, end].
        peak: bytes in its backward pass beside what is held before it; infinite if it has a part of a nested model
            and something outside that, which no call computes a second time.
        held_kept: as `held`, if its inside is kept.
        peak_kept: as `peak`, if its inside is kept.
        seconds: of its forward pass.
    """

    places: Any
    held: Any
    peak: Any
    held_kept: Any
    peak_kept: Any
    seconds: Any

    @classmethod
    def of(cls, steps: Sequence[Step], places: Sequence[int] | None = None) -> Table:
        """Return the table of a chain, over all its places or the given ones."""
        ends = [number + 1 for number, each in enumerate(steps[:-1]) if each.may_end]
        if places is None and len(ends) > MOST_PLACES:
            crossing = cls.of(steps, [0, *ends, len(steps)]).held[0, 1:-1]
            windows = np.array_split(np.arange(len(ends)), MOST_PLACES)
            edges = {edge for model in nested_models(steps) for edge in model} & set(ends)
            ends = sorted(edges.union(ends[window[np.argmin(crossing[window])]] for window in windows))
        at = np.array([0, *ends, len(steps)] if places is None else places)
        time = np.concatenate([[0.0], np.cumsum([each.seconds for each in steps])])[at]
        seconds = time[None, :] - time[:, None]
        held, peak = _swept(steps, at, again=True)
        begin, end = at[:, None], at[None, :]
        for first, last in nested_models(steps):
            peak[
                ((begin < first) & (first < end) & (end < last)) | ((first < begin) & (begin < last) & (last < end))
            ] = np.inf
        return cls(at, held, peak, *_swept(steps, at, again=False), seconds)

    def peak_of(self, cuts: Sequence[Cut]) -> list[tuple[float, float]]:
        """Return the bytes that each segment holds, and the peak in its backward pass.

        Args:
            cuts: the ends of the segments.
        """
        before, begin, costs = 0.0, 0, []
        for place, again in cuts:
            end = int(np.searchsorted(self.places, place))
            held, peak = (self.held, self.peak) if again else (self.held_kept, self.peak_kept)
            costs.append((float(held[begin, end]), before + float(peak[begin, end])))
            before, begin = before + float(held[begin, end]), end
        return costs


def lowest_peak(table: Table, segments: int | None = None) -> list[Cut]:
    """Return the partition of the lowest peak: all segments but the last recomputed.

    Args:
        table: of the chain.
        segments: how many; None: as many as it takes.
    """
    low, high = 0.0, float(table.peak_kept[0, -1]) * 2 + 1
    best = _least_held(table, high, segments)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        found = _least_held(table, middle, segments)
        if found is None:
            low = middle
        else:
            best, high = (found, min(middle, max(peak for _, peak in table.peak_of(found))))
    return best or [(int(table.places[-1]), False)]


def _least_held(table: Table, limit: float, segments: int | None) -> list[Cut] | None:
    """Return a partition with all peaks within the limit, or None.

    At each place the least that segments up to there can hold is known; with a number of segments, for each number.
    """
    size, counts, more = len(table.places), segments or 1, 0 if segments is None else 1
    held, origin = np.full((size, counts), np.inf), np.zeros((size, counts), int)
    held[0, 0] = 0.0
    for place in range(1, size - 1):
        before = held[:place, : counts - more]
        fits = before + table.peak[:place, place, None] <= limit
        total = np.where(fits, before + table.held[:place, place, None], np.inf)
        held[place, more:], origin[place, more:] = total.min(axis=0), total.argmin(axis=0)
    # The last segment, which is kept, costs nothing: it begins where the longest that fits does.
    begins = np.flatnonzero(held[:-1, -1] + table.peak_kept[:-1, -1] <= limit)
    if not len(begins):
        return None
    cuts, place, count = [(int(table.places[-1]), False)], int(begins[0]), counts - 1
    while place:
        cuts.append((int(table.places[place]), True))
        place, count = int(origin[place, count]), count - more
    return cuts[::-1]


def _swept(steps: Sequence[Step], at: Any, again: bool) -> tuple[Any, Any]:
    """Return the held bytes and the peaks of all segments, from the last step to the first.

    The backward pass of a step takes place while all before it in its segment is still there. What the model puts out
    is gone by then, unless a gradient needs it.
    """
    size = len(at)
    held, peak = np.zeros((size, size)), np.zeros((size, size))
    holds, tops = (np.zeros(size), np.zeros(size))  # of the segments from here to each place
    for number in range(len(steps) - 1, -1, -1):
        own, leaving = np.zeros(size), np.zeros(size)
        for each in steps[number].kept:
            crosses = at <= min(-1 if each.last_use is None else each.last_use, len(steps) - 1)
            leaving += each.bytes * crosses
            if each.for_gradient:
                # Where only later segments take it, a second run has no use for it.
                needless = again and not each.for_own_gradient and each.first_use is not None
                own += each.bytes * (~(at <= each.first_use) if needless else 1)
            elif not again:
                own += each.bytes * crosses
        tops = own + np.maximum(steps[number].working_bytes, tops)
        holds = holds + (leaving if again else own)
        tops[at <= number], holds[at <= number] = 0.0, 0.0
        begin = np.flatnonzero(at == number)
        if len(begin):
            held[begin[0]], peak[begin[0]] = holds, tops
    return held, peak


def cheapest(table: Table, limit: float) -> list[Cut] | None:
    """Return the partition within the limit that recomputes least, or None."""
    size = len(table.places)
    # At each place a few partitions up to there, each better than the others in what it holds or in what it has spent.
    held, spent = (np.full((size, MOST_LABELS), np.inf), np.full((size, MOST_LABELS), np.inf))
    origin = np.zeros((size, MOST_LABELS, 3), int)  # the place before, which partition there, whether recomputed
    held[0, 0], spent[0, 0] = 0.0, 0.0
    for end in range(1, size):
        found = []
        for again, own, peak in ((0, table.held_kept, table.peak_kept), (1, table.held, table.peak)):
            if again and end == size - 1:
                continue
            fits = held[:end] + peak[:end, end, None] <= limit
            begins, labels = np.nonzero(fits)
            holds = held[begins, labels] + own[begins, end]
            takes = spent[begins, labels] + again * table.seconds[begins, end]
            found.append(np.stack([holds, takes, begins, labels, np.full(len(begins), again)]))
        best = _thinned(np.concatenate(found, axis=1))
        count = best.shape[1]
        held[end, :count], spent[end, :count] = best[0], best[1]
        origin[end, :count] = best[2:].T
    if not np.isfinite(spent[-1]).any():
        return None
    place, label = size - 1, int(np.argmin(spent[-1]))
    cuts: list[Cut] = []
    while place:
        begin, before, again = (int(each) for each in origin[place, label])
        cuts.append((int(table.places[place]), bool(again)))
        place, label = begin, before
    return merged(cuts[::-1])


def _thinned(found: Any) -> Any:
    """Return the columns (held, spent, …) that no other beats in both, and of many an even choice."""
    found = found[:, np.lexsort((found[1], found[0]))]
    lowest = np.minimum.accumulate(found[1]) if found.shape[1] else found[1]
    new = np.ones(found.shape[1], bool)
    new[1:] = found[1, 1:] < lowest[:-1]
    best = found[:, new]
    if best.shape[1] <= MOST_LABELS:
        return best
    return best[:, np.round(np.linspace(0, best.shape[1] - 1, MOST_LABELS)).astype(int)]


def merged(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the cuts without those between two segments that are both kept."""
    return [each for number, each in enumerate(cuts) if number + 1 == len(cuts) or each[1] or cuts[number + 1][1]]
