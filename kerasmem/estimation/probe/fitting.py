"""Each allocation of a recorded step as a line `a + c·batch`, and the step replayed at a batch that was not run.

Pure arithmetic over recorded events. The run at the largest batch is the pattern: what is allocated and freed, in
which order, from the process's start on. The sizes that the same allocations have at smaller batches, found by
operation, region and occurrence, say how each grows. Then the allocator is simulated with the sizes of the target.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kerasmem.devices.recording import ALLOCATE, AllocatorEvent, Mark
from kerasmem.estimation.allocator import FREE, GRAIN, BFCAllocator, Step, replay, smallest_limit

SETUP, BATCH, FIRST, STEP = "setup", "batch", "first", "step"
_STEPS_FOR_LIMIT = 3
_TOLERANCE = 0.01  # of a size: kernels' scratch grows by whole blocks
_FUNCTION_NUMBER = re.compile(r"(__(?:inference|forward|backward)_\w*?)_\d+\b")

Key = tuple[str, str, int]  # operation, region, occurrence of both within the segment
_Sizes = dict[Any, set[int]]  # of allocations at one batch: by kind of segment and key, and by operation alone


@dataclass(frozen=True)
class Segment:
    """A part of a recording: `kind` is "setup", "batch", "first" or "step"; `run` counts batch sizes from 1."""

    kind: str
    run: int
    events: Sequence[AllocatorEvent]

    def keyed(self) -> Iterator[tuple[Key | None, AllocatorEvent]]:
        """Yield each event, with the key of its allocation, or None for a free."""
        seen: dict[tuple[str, str], int] = defaultdict(int)
        for event in self.events:
            if event.kind != ALLOCATE:
                yield None, event
                continue
            name = plain_name(event.op), event.region
            yield (*name, seen[name]), event
            seen[name] += 1


@dataclass(frozen=True)
class Fit:
    """A recorded process with a line for each allocation.

    Attributes:
        batch_size: of the pattern.
        steps: of the pattern: (key, bytes) and (key, FREE).
        slopes: bytes that the allocation with this key (its place in this list) grows by with each sample.
        begins: where in `steps` each measured step begins; the last entry is the end.
        off: the share of a step's bytes that do not lie on a line.
        unmatched: the share of a step's bytes without a counterpart at another batch.
    """

    batch_size: int
    steps: tuple[Step, ...]
    slopes: tuple[float, ...]
    begins: tuple[int, ...]
    off: float
    unmatched: float

    def at(self, batch_size: int) -> list[Step]:
        """Return the steps with the sizes that they have at another batch."""
        more = batch_size - self.batch_size
        return [
            (key, size if size == FREE else max(round(size + self.slopes[key] * more), min(size, 1)))
            for key, size in self.steps
        ]


@dataclass(frozen=True)
class Replayed:
    """A fit replayed at one batch.

    Attributes:
        peaks: the peak in use of each step, in bytes.
        requested: the bytes asked for at each of those peaks.
        reserved: all regions at the end.
        smallest_limit: the smallest limit under which setting up and the first steps run; None if not asked for.
    """

    peaks: tuple[int, ...]
    requested: tuple[int, ...]
    reserved: int
    smallest_limit: int | None

    @property
    def total(self) -> int:
        """The median of the peaks."""
        return int(statistics.median(self.peaks))


@lru_cache(maxsize=1 << 16)
def plain_name(operation: str) -> str:
    """Return an operation's name without the numbers that TensorFlow gives to traced functions, which count up.

    Examples:
        >>> plain_name("__inference_one_step_on_data_233")
        '__inference_one_step_on_data'
    """
    return _FUNCTION_NUMBER.sub(r"\1", operation)


def split_recording(events: Sequence[AllocatorEvent], marks: Iterable[Mark]) -> list[Segment]:
    """Return the recording in parts; a mark's name ends with the kind of the part that it begins."""
    segments = []
    kind, run, index = SETUP, 0, 0
    for mark in [*marks, None]:
        end = index
        while end < len(events) and (mark is None or events[end].time < mark.time):
            end += 1
        segments.append(Segment(kind, run, events[index:end]))
        if mark is not None:
            kind, run, index = mark.name.rpartition("-")[2], mark.number, end
    return segments


def fit_recording(segments: Sequence[Segment], batch_sizes: Sequence[int]) -> Fit:
    """Return the lines through the sizes that were seen.

    Args:
        segments: of a recording whose runs had these batch sizes.
        batch_sizes: of run 1, the largest and the pattern, and of the others, falling; two or three in all.
    """
    pattern = [segment for segment in segments if segment.run <= 1]
    others = [_sizes(segments, run) for run in range(2, len(batch_sizes) + 1)]
    steps: list[Step] = []
    slopes: list[float] = []
    begins: list[int] = []
    holders: dict[int, int] = {}
    total = off = unmatched = 0
    for segment in pattern:
        if segment.kind == STEP:
            begins.append(len(steps))
        counts = segment.kind in (FIRST, STEP)
        for key, event in segment.keyed():
            if key is None:
                if event.address in holders:
                    steps.append((holders.pop(event.address), FREE))
                continue
            slope, is_on, is_matched = 0.0, True, True
            if segment.kind != SETUP:
                alike = [_alike(each, segment.kind, key) for each in others]
                slope, is_on, is_matched = _slope(batch_sizes, event, alike)
                if not is_matched:
                    slope, is_matched = _guess(batch_sizes, event, [each.get(key[0], set()) for each in others])
            if counts:
                total += event.requested
                off += event.requested * (not is_on)
                unmatched += event.requested * (not is_matched)
            holders[event.address] = len(slopes)
            steps.append((len(slopes), event.requested))
            slopes.append(slope)
    begins.append(len(steps))
    share = max(total, 1)
    return Fit(batch_sizes[0], tuple(steps), tuple(slopes), tuple(begins), off / share, unmatched / share)


def replay_fit(fit: Fit, batch_size: int, *, descending: bool, with_limit: bool = True) -> Replayed:
    """Simulate the allocator over the fitted steps at one batch size.

    Args:
        fit: from `fit_recording`.
        batch_size: samples.
        descending: as for `BFCAllocator`: how the recorded device hands out regions.
        with_limit: also find the smallest limit, which takes some dozen replays.
    """
    steps = fit.at(batch_size)
    pool = BFCAllocator(descending=descending)
    live = replay(pool, steps[: fit.begins[0]])
    peaks, requested = [], []
    for begin, end in zip(fit.begins, fit.begins[1:], strict=False):
        pool.reset_peak()
        replay(pool, steps[begin:end], live)
        peaks.append(pool.peak)
        requested.append(pool.requested_at_peak)
    limit = None
    if with_limit:
        end = fit.begins[min(_STEPS_FOR_LIMIT, len(fit.begins) - 1)]
        limit = smallest_limit(steps[:end], descending=descending)
    return Replayed(tuple(peaks), tuple(requested), pool.reserved, limit)


def _sizes(segments: Iterable[Segment], run: int) -> _Sizes:
    sizes: _Sizes = defaultdict(set)
    for segment in segments:
        if segment.run != run:
            continue
        for key, event in segment.keyed():
            if key is not None:
                sizes[segment.kind, key].add(event.requested)
                sizes[key[0]].add(event.requested)
    return sizes


def _alike(sizes: _Sizes, kind: str, key: Key) -> set[int]:
    found = sizes.get((kind, key))
    if found is None and kind != BATCH:  # an operation may allocate in some steps and reuse a buffer in others
        found = sizes.get((STEP if kind == FIRST else FIRST, key))
    return found or set()


def _slope(batch_sizes: Sequence[int], event: AllocatorEvent, others: Sequence[set[int]]) -> tuple[float, bool, bool]:
    """Return how a size grows with the batch, from the largest batch's and those of smaller ones.

    Returns:
        The slope, whether the sizes lie on a line as far as can be seen, and whether there are any.
    """
    size = event.requested
    if not any(others):
        return 0.0, True, False
    slopes = [
        [(size - other) / (batch_sizes[0] - batch) for other in sorted(found)]
        for batch, found in zip(batch_sizes[1:], others, strict=True)
    ]
    if len(slopes) == 1 or not all(slopes):
        return min((slope for each in slopes for slope in each), key=abs), True, True
    # Of what the nearer batch says, take what the farther one agrees with.
    apart = batch_sizes[0] - batch_sizes[2]
    near, wrong = min(
        ((near, abs(near - far) * apart) for near in slopes[0] for far in slopes[1]), key=lambda pair: pair[1]
    )
    return near, wrong <= max(GRAIN, _TOLERANCE * size), True


def _guess(batch_sizes: Sequence[int], event: AllocatorEvent, others: Sequence[set[int]]) -> tuple[float, bool]:
    """Return a slope for an allocation that no other batch has, and whether it is a good one."""
    if len(others) == 2 and all(others):
        slope, is_on, _ = _slope(batch_sizes, event, others)
        if is_on:
            return slope, True
    is_batch_first = event.shape.startswith((f"[{batch_sizes[0]},", f"[{batch_sizes[0]}]"))
    return (event.requested / batch_sizes[0] if is_batch_first else 0.0), False
