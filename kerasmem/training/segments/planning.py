"""From what was asked for to a plan: so many segments, the lowest peak, or the least time within a target.

Sizes are bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.models.segment_cuts import Cuts
from kerasmem.records import Record
from kerasmem.training.segments.chain import Step
from kerasmem.training.segments.choosing import Cut, Table, cheapest, inner_places, lowest_peak
from kerasmem.units import format_size

AUTO = "auto"
MOST_LEVELS = 2


@dataclass(frozen=True)
class PlannedSegment:
    """A run of layers between two cuts.

    Attributes:
        first: name of its first layer.
        last: of its last.
        recomputed: whether its inside is computed again for the gradient, rather than kept.
        held_bytes: what it leaves in memory until its gradient is computed: its inside where that is kept, else the
            tensors that cross its end.
        peak_bytes: activations in memory while its gradient is computed, those of the segments before included.
        flops: of its matrix products and convolutions, forward.
        extra_flops: of those that are computed again.
        cuts: the layers after which it is cut itself while it runs again; all but its last part then run once more.
    """

    first: str
    last: str
    recomputed: bool
    held_bytes: int
    peak_bytes: int
    flops: int
    extra_flops: int = 0
    cuts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecomputePlan(Record, what="recomputation plan", version=1, also=("predicted_bytes",)):
    """Where a model is cut, and what that is predicted to save and to cost.

    Attributes:
        batch_size: samples in a batch, for which all of it holds.
        segments: in the order of the model.
        activation_bytes: predicted peak of what the backward pass needs of the forward pass, with what it works on, its
            kernels' scratch and the gradients of the weights that are updated meanwhile.
        plain_activation_bytes: the same without recomputation.
        persistent_bytes: weights, the optimizer's slots and the batch, which recomputation leaves as they are.
        forward_flops: of one forward pass: matrix products and convolutions.
        extra_flops: what is computed again.
        extra_time: predicted share by which a step takes longer, the backward pass taken as two forward passes.
        target_bytes: the memory that was asked for; None where none was.
    """

    batch_size: int
    segments: tuple[PlannedSegment, ...]
    activation_bytes: int
    plain_activation_bytes: int
    persistent_bytes: int
    forward_flops: int
    extra_flops: int
    extra_time: float
    target_bytes: int | None = None

    @property
    def cuts(self) -> tuple[Cuts, ...]:
        """The layers after which a segment ends; before its end, in a tuple, those after which it is cut itself."""
        parts = [(*((each.cuts,) if each.cuts else ()), each.last) for each in self.segments]
        return tuple(each for part in parts for each in part)[:-1]

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """For each segment whether it is recomputed."""
        return tuple(each.recomputed for each in self.segments)

    @property
    def predicted_bytes(self) -> int:
        """Predicted peak of a training step; `kerasmem.estimate` of the recomputed model says it more exactly."""
        return self.activation_bytes + self.persistent_bytes


def plan_segments(
    steps: Sequence[Step],
    *,
    segments: int | str = AUTO,
    batch_size: int,
    persistent_bytes: int = 0,
    target_bytes: int | None = None,
    levels: int = 1,
) -> RecomputePlan:
    """Return where to cut a chain.

    Args:
        steps: the chain.
        segments: how many; "auto": those of the lowest peak or, with a target, those that cost the least time and
            meet it.
        batch_size: samples in a batch, for which the steps were traced.
        persistent_bytes: what is in memory besides activations.
        target_bytes: the memory to stay within, `persistent_bytes` included.
        levels: how often a step may run again; with 2 a segment that runs again may be cut itself.

    Raises:
        UsageError: the chain has not so many places to be cut, or no partition meets the target.

    Examples:
        >>> from kerasmem.training.segments.chain import Kept, Step
        >>> inside = Kept(90, None, None, True)
        >>> steps = [Step(f"dense_{n}", 1.0, 100, 0, (inside, Kept(10, n + 1, n + 1, True))) for n in range(9)]
        >>> plan = plan_segments(steps, segments=3, batch_size=1)
        >>> plan.cuts, plan.activation_bytes, plan.plain_activation_bytes
        (('dense_2', 'dense_5'), 330, 910)
    """
    check_levels(levels)
    table = Table.of(steps)
    chosen = table.cut_inside() if levels > 1 else table
    budget = None if target_bytes is None else target_bytes - persistent_bytes
    cuts: list[Cut] | None
    if segments != AUTO:
        most = len(table.places) - 1
        given: Any = segments  # NumPy's whole numbers too
        if isinstance(given, bool) or not isinstance(given, Integral) or not 1 <= int(given) <= most:
            raise UsageError(
                f"segments {segments!r}: write 'auto' or a whole number from 1 to {most}, one for each layer"
            )
        cuts = lowest_peak(chosen, int(segments))
    elif budget is not None:
        cuts = cheapest(table, budget) or cheapest(chosen, budget)
    else:
        cuts = lowest_peak(chosen)
    lowest = max(peak for _, peak in chosen.peak_of(cuts or lowest_peak(chosen)))
    if budget is not None and (cuts is None or lowest > budget):
        raise UsageError(
            f"memory {format_size(target_bytes or 0)}: even cut {'at the best places' if segments == AUTO else 'so'} "
            f"the step needs about {format_size(round(lowest) + persistent_bytes)} at batch {batch_size:,}, "
            f"{format_size(persistent_bytes)} of it weights, optimizer and batch; {way_out(levels)}"
        )
    inner = inner_places(table, cuts or (), lowest if budget is None else budget)
    return described(steps, cuts or [], batch_size, persistent_bytes, target_bytes, inner)


def described(
    steps: Sequence[Step],
    cuts: Sequence[Cut],
    batch_size: int,
    persistent_bytes: int,
    target_bytes: int | None,
    inner: Sequence[Sequence[int]] = (),
) -> RecomputePlan:
    """Return the plan of given cuts, and of those inside each segment, with what it is predicted to take."""
    inner = inner or [()] * len(cuts)
    table = Table.of(steps, sorted({0, len(steps), *(place for place, _ in cuts), *itertools.chain(*inner)}))
    begins = [0, *(place for place, _ in cuts)]
    parts, twice = [], 0.0
    for begin, (end, again), places, (held, peak) in zip(begins, cuts, inner, table.peak_of(cuts, inner), strict=False):
        runs_again = [*steps[begin:end], *steps[begin : max(places, default=begin)]] if again else []
        twice += sum(each.seconds for each in runs_again)
        parts.append(
            PlannedSegment(
                first=steps[begin].name,
                last=steps[end - 1].name,
                recomputed=again,
                held_bytes=round(held),
                peak_bytes=round(peak),
                flops=sum(each.flops for each in steps[begin:end]),
                extra_flops=sum(each.flops for each in runs_again),
                cuts=tuple(steps[place - 1].name for place in places),
            )
        )
    forward = sum(each.seconds for each in steps)
    return RecomputePlan(
        batch_size=batch_size,
        segments=tuple(parts),
        activation_bytes=max(each.peak_bytes for each in parts),
        plain_activation_bytes=round(table.peak_of([(len(steps), False)])[0][1]),
        persistent_bytes=persistent_bytes,
        forward_flops=sum(each.flops for each in steps),
        extra_flops=sum(each.extra_flops for each in parts),
        extra_time=round(twice / (3 * forward), 4) if forward else 0.0,
        target_bytes=target_bytes,
    )


def uncut(plan: RecomputePlan) -> RecomputePlan:
    """Return the plan of the same model that recomputes nothing."""
    first, last = plan.segments[0], plan.segments[-1]
    peak, flops = plan.plain_activation_bytes, sum(each.flops for each in plan.segments)
    whole = PlannedSegment(first.first, last.last, recomputed=False, held_bytes=peak, peak_bytes=peak, flops=flops)
    return replace(plan, segments=(whole,), activation_bytes=peak, extra_flops=0, extra_time=0.0)


def check_levels(levels: object) -> None:
    """Refuse a number of levels that there is not."""
    if levels not in range(1, MOST_LEVELS + 1):
        raise UsageError(f"levels {levels!r}: write a whole number from 1 to {MOST_LEVELS}")


def way_out(levels: int) -> str:
    """Return what is left to do where a step does not fit, cut on so many levels."""
    return "take a smaller batch" + (", or levels=2, which computes more again" if levels < MOST_LEVELS else "")


def listed(cuts: Sequence[Cuts]) -> str:
    """Return cuts as a message names them."""
    return ", ".join(each if isinstance(each, str) else f"({', '.join(each)})" for each in cuts)
