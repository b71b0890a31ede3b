"""Plans of a chain: a number of segments, the lowest peak, or the least time within a target. Pure arithmetic.

A step is one call of a layer. The chain may be cut between two neighboring steps. The tensors that cross a cut are
kept, and the tensors between two cuts are recomputed from them.

In the backward pass of a segment memory holds the kept tensors of all segments before, the inside of the segment, the
gradient from above, and scratch. All segments but the last are recomputed, and hold the tensors that cross their ends;
the last one holds its whole inside. So everything after a cut depends only on the bytes held at it, which allows
dynamic programming over the cuts.

Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kerasmem.checks import whole
from kerasmem.errors import UsageError
from kerasmem.records import Record
from kerasmem.units import format_size

AUTO = "auto"
_CLOSE = 1e-3


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of a step that outlives the step.

    Attributes:
        bytes: size in bytes.
        last_use: number of the last step that reads it; the number of steps for an output of the model; None if no
            step reads it.
        for_gradient: whether the backward pass needs its value.
    """

    bytes: int
    last_use: int | None
    for_gradient: bool


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        name: name of the layer, after those of nested models: "mobilenet/conv1".
        seconds: rough time of its forward pass (`kerasmem.estimation.graph.rules`); only ratios count.
        working_bytes: peak of other memory during the call or its gradient: temporary tensors, the kernels' scratch,
            gradients for earlier steps, and the weights' gradients with their update.
        kept_tensors: tensors that outlive the call.
        may_end: whether a segment may end after it; False if the layer is called again later.
    """

    name: str
    seconds: float
    working_bytes: int
    kept_tensors: tuple[KeptTensor, ...]
    may_end: bool = True


def nested_models(steps: Sequence[LayerCall]) -> list[tuple[int, int]]:
    """Return the number of steps before the beginning and before the end of each nested model.

    Examples:
        >>> nested_models([LayerCall(name, 1.0, 0, ()) for name in ("scale", "net/conv", "net/block/conv", "head")])
        [(1, 3), (2, 3)]
    """
    bounds: dict[str, tuple[int, int]] = {}
    for number, step in enumerate(steps):
        names = step.name.split("/")
        for depth in range(1, len(names)):
            begin, _ = bounds.setdefault("/".join(names[:depth]), (number, 0))
            bounds["/".join(names[:depth])] = (begin, number + 1)
    return list(bounds.values())


@dataclass(frozen=True)
class CostTable:
    """The cost of a segment between each pair of boundaries.

    Attributes:
        boundaries: number of steps before each boundary.
        held_bytes: bytes that a recomputed segment holds after it, [begin, end].
        peak: bytes in its backward pass without those of earlier segments; infinite if it has a part of a nested model
            and steps outside of it, which no single call recomputes.
        held_kept, peak_kept: the same for the kept segment from each boundary to the end of the chain.
    """

    boundaries: Any
    held_bytes: Any
    peak: Any
    held_kept: Any
    peak_kept: Any

    @classmethod
    def of(cls, steps: Sequence[LayerCall], boundaries: Sequence[int] | None = None) -> CostTable:
        """Return the table of a chain. `boundaries` defaults to all possible ones."""
        ends = [number + 1 for number, step in enumerate(steps[:-1]) if step.may_end]
        at = np.array([0, *ends, len(steps)] if boundaries is None else boundaries)
        held_bytes, peak = _sweep(steps, at, again=True)
        begin, end = at[:, None], at[None, :]
        for first, last in nested_models(steps):
            peak[
                ((begin < first) & (first < end) & (end < last)) | ((first < begin) & (begin < last) & (last < end))
            ] = np.inf
        held_kept, peak_kept = _sweep(steps, at, again=False)
        return cls(at, held_bytes, peak, held_kept[:, -1], peak_kept[:, -1])

    def peak_of(self, ends: Sequence[int]) -> list[tuple[float, float]]:
        """Return the bytes that each segment holds, and the peak in its backward pass.

        Args:
            ends: number of steps before the end of each segment.
        """
        before, begin, costs = 0.0, 0, []
        for boundary in ends[:-1]:
            end = int(np.searchsorted(self.boundaries, boundary))
            held_bytes, peak = float(self.held_bytes[begin, end]), float(self.peak[begin, end])
            costs.append((held_bytes, before + peak))
            before, begin = before + held_bytes, end
        return [*costs, (float(self.held_kept[begin]), before + float(self.peak_kept[begin]))]


def lowest_peak(table: CostTable, segments: int | None = None) -> list[int]:
    """Return the ends of the segments with the lowest peak.

    Args:
        table: table of the chain.
        segments: number of segments. Defaults to any number.
    """
    low, high = 0.0, float(table.peak_kept[0]) * 2 + 1
    best = partition_within(table, high, segments)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        ends = partition_within(table, middle, segments)
        if ends is None:
            low = middle
        else:
            best, high = ends, min(middle, max(peak for _, peak in table.peak_of(ends)))
    return best or [int(table.boundaries[-1])]


def partition_within(table: CostTable, limit: float, segments: int | None = None) -> list[int] | None:
    """Return the partition within the limit with the longest last segment, which is kept, or None.

    For each boundary, compute the least bytes that segments up to it can hold, for each number of segments if it is
    set.
    """
    size, counts, more = len(table.boundaries), segments or 1, 0 if segments is None else 1
    held_bytes, origin = np.full((size, counts), np.inf), np.zeros((size, counts), int)
    held_bytes[0, 0] = 0.0
    for boundary in range(1, size - 1):
        before = held_bytes[:boundary, : counts - more]
        fits = before + table.peak[:boundary, boundary, None] <= limit
        total = np.where(fits, before + table.held_bytes[:boundary, boundary, None], np.inf)
        held_bytes[boundary, more:], origin[boundary, more:] = total.min(axis=0), total.argmin(axis=0)
    # The last segment is kept and costs no time, so it should be the longest that fits.
    begins = np.flatnonzero(held_bytes[:-1, -1] + table.peak_kept[:-1] <= limit)
    if not len(begins):
        return None
    ends, boundary, count = [int(table.boundaries[-1])], int(begins[0]), counts - 1
    while boundary:
        ends.append(int(table.boundaries[boundary]))
        boundary, count = int(origin[boundary, count]), count - more
    return ends[::-1]


def _sweep(steps: Sequence[LayerCall], at: Any, again: bool) -> tuple[Any, Any]:
    """Return the held bytes and the peaks of all segments, from the last step to the first.

    During the backward pass of a step all earlier tensors of its segment are in memory. The model's outputs are freed
    by then, unless a gradient needs them.
    """
    size = len(at)
    held_bytes, peak = np.zeros((size, size)), np.zeros((size, size))
    holds, tops = (np.zeros(size), np.zeros(size))  # of the segments from this step to each boundary
    for number in range(len(steps) - 1, -1, -1):
        own, leaving = np.zeros(size), np.zeros(size)
        for tensor in steps[number].kept_tensors:
            crosses = at <= min(-1 if tensor.last_use is None else tensor.last_use, len(steps) - 1)
            leaving += tensor.bytes * crosses
            if tensor.for_gradient:
                own += tensor.bytes
            elif not again:
                own += tensor.bytes * crosses
        tops = own + np.maximum(steps[number].working_bytes, tops)
        holds = holds + (leaving if again else own)
        tops[at <= number], holds[at <= number] = 0.0, 0.0
        begin = np.flatnonzero(at == number)
        if len(begin):
            held_bytes[begin[0]], peak[begin[0]] = holds, tops
    return held_bytes, peak


@dataclass(frozen=True)
class PlannedSegment:
    """A run of layers between two cuts.

    Attributes:
        first: name of its first layer.
        last: name of its last layer.
        held_bytes: bytes in memory until its gradient is computed: the inside of the last segment, or the tensors that
            cross the end of another.
        peak_bytes: activations in memory while its gradient is computed, including those of earlier segments.
    """

    first: str
    last: str
    held_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class RecomputePlan(Record, what="recomputation plan", version=1, also=("predicted_bytes",)):
    """The cuts of a model, with their predicted saving and cost.

    Attributes:
        batch_size: samples per batch, to which all values refer.
        segments: segments in the order of the model.
        activation_bytes: predicted peak of activations, temporary tensors, the kernels' scratch and the gradients of
            weights during the backward pass.
        plain_activation_bytes: the same without recomputation.
        persistent_bytes: weights, the optimizer's slots and the batch, which recomputation does not change.
        extra_time: predicted relative increase of a step's time, with the backward pass counted as two forward passes.
        target_bytes: the requested memory, or None.
    """

    batch_size: int
    segments: tuple[PlannedSegment, ...]
    activation_bytes: int
    plain_activation_bytes: int
    persistent_bytes: int
    extra_time: float
    target_bytes: int | None = None

    @property
    def cuts(self) -> tuple[str, ...]:
        """The last layer of each segment but the last."""
        return tuple(segment.last for segment in self.segments[:-1])

    @property
    def predicted_bytes(self) -> int:
        """Predicted peak of a training step. `kerasmem.estimate` of the recomputed model is more accurate."""
        return self.activation_bytes + self.persistent_bytes


def plan_segments(
    steps: Sequence[LayerCall],
    *,
    segments: int | str = AUTO,
    batch_size: int,
    persistent_bytes: int = 0,
    target_bytes: int | None = None,
) -> RecomputePlan:
    """Plan the cuts of a chain.

    Args:
        steps: the chain.
        segments: number of segments; "auto" for the lowest peak or, with a target, for the shortest recomputed part
            that meets it.
        batch_size: samples per batch, for which the steps were traced.
        persistent_bytes: memory besides activations.
        target_bytes: maximum memory, including `persistent_bytes`. Defaults to no limit.

    Raises:
        UsageError: If the chain has too few boundaries for the segments, or no partition meets the target.

    Examples:
        >>> inside = KeptTensor(90, None, True)
        >>> steps = [LayerCall(f"dense_{n}", 1.0, 0, (inside, KeptTensor(10, n + 1, True))) for n in range(9)]
        >>> plan = plan_segments(steps, segments=3, batch_size=1)
        >>> plan.cuts, plan.activation_bytes, plan.plain_activation_bytes
        (('dense_2', 'dense_5'), 320, 900)
    """
    table = CostTable.of(steps)
    budget = None if target_bytes is None else target_bytes - persistent_bytes
    ends: list[int] | None
    if segments != AUTO:
        most = len(table.boundaries) - 1
        ends = lowest_peak(table, whole("segments", segments, most=most))
    elif budget is not None:
        ends = partition_within(table, budget)
    else:
        ends = lowest_peak(table)
    lowest = max(peak for _, peak in table.peak_of(ends or lowest_peak(table)))
    if budget is not None and (ends is None or lowest > budget):
        raise UsageError(
            f"memory {format_size(target_bytes or 0)} is too small: cut "
            f"{'at the best places' if segments == AUTO else f'in {segments} segments'}, the step needs about "
            f"{format_size(round(lowest) + persistent_bytes)} at batch {batch_size:,}, "
            f"{format_size(persistent_bytes)} of it weights, optimizer and batch; use a smaller batch"
        )
    return describe_plan(steps, ends or [], batch_size, persistent_bytes, target_bytes)


def describe_plan(
    steps: Sequence[LayerCall], ends: Sequence[int], batch_size: int, persistent_bytes: int, target_bytes: int | None
) -> RecomputePlan:
    """Return the plan with these ends of segments, with predicted bytes and time."""
    table = CostTable.of(steps, [0, *ends])
    begins = [0, *ends]
    parts = []
    for begin, end, (held_bytes, peak) in zip(begins, ends, table.peak_of(ends), strict=False):
        parts.append(PlannedSegment(steps[begin].name, steps[end - 1].name, round(held_bytes), round(peak)))
    forward = sum(step.seconds for step in steps)
    twice = sum(step.seconds for step in steps[: begins[-2]])
    return RecomputePlan(
        batch_size=batch_size,
        segments=tuple(parts),
        activation_bytes=max(part.peak_bytes for part in parts),
        plain_activation_bytes=round(table.peak_of([len(steps)])[0][1]),
        persistent_bytes=persistent_bytes,
        extra_time=round(twice / (3 * forward), 4) if forward else 0.0,
        target_bytes=target_bytes,
    )


def uncut(plan: RecomputePlan) -> RecomputePlan:
    """Return the plan of the same model without recomputation."""
    first, last = plan.segments[0], plan.segments[-1]
    peak = plan.plain_activation_bytes
    whole = PlannedSegment(first.first, last.last, held_bytes=peak, peak_bytes=peak)
    return replace(plan, segments=(whole,), activation_bytes=peak, extra_time=0.0)
