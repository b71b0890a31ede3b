"""Plans: a number of segments, the lowest peak, or the least time within a target.

Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kerasmem.checks import whole
from kerasmem.errors import UsageError
from kerasmem.records import Record
from kerasmem.training.segments.chain import Step
from kerasmem.training.segments.choosing import Cut, Table, cheapest, lowest_peak
from kerasmem.units import format_size

AUTO = "auto"


@dataclass(frozen=True)
class PlannedSegment:
    """A run of layers between two cuts.

    Attributes:
        first: name of its first layer.
        last: of its last.
        recomputed: whether its inside is computed again for the gradient, rather than kept.
        held_bytes: what it leaves in memory until its gradient is computed: its inside if that is kept, else the
            tensors that cross its end.
        peak_bytes: activations in memory while its gradient is computed, those of the segments before included.
    """

    first: str
    last: str
    recomputed: bool
    held_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class RecomputePlan(Record, what="recomputation plan", version=1, also=("predicted_bytes",)):
    """The cuts of a model, with their predicted saving and cost.

    Attributes:
        batch_size: samples in a batch, for which all of it holds.
        segments: in the order of the model.
        activation_bytes: predicted peak of what the backward pass needs of the forward pass, with what it works on, its
            kernels' scratch and the gradients of the weights that are updated meanwhile.
        plain_activation_bytes: the same without recomputation.
        persistent_bytes: weights, the optimizer's slots and the batch, which recomputation leaves as they are.
        extra_time: predicted share by which a step takes longer, the backward pass taken as two forward passes.
        target_bytes: the memory that was asked for; None if none was.
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
        return tuple(each.last for each in self.segments[:-1])

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """For each segment whether it is recomputed."""
        return tuple(each.recomputed for each in self.segments)

    @property
    def predicted_bytes(self) -> int:
        """Predicted peak of a training step. `kerasmem.estimate` of the recomputed model is more exact."""
        return self.activation_bytes + self.persistent_bytes


def plan_segments(
    steps: Sequence[Step],
    *,
    segments: int | str = AUTO,
    batch_size: int,
    persistent_bytes: int = 0,
    target_bytes: int | None = None,
) -> RecomputePlan:
    """Plan the cuts of a chain.

    Args:
        steps: the chain.
        segments: how many; "auto": those of the lowest peak or, with a target, those that cost the least time and
            meet it.
        batch_size: samples in a batch, for which the steps were traced.
        persistent_bytes: what is in memory besides activations.
        target_bytes: the memory to stay within, `persistent_bytes` included.

    Raises:
        UsageError: the chain has not so many places to be cut, or no partition meets the target.

    Examples:
        >>> from kerasmem.training.segments.chain import Kept, Step
        >>> inside = Kept(90, None, None, True)
        >>> steps = [Step(f"dense_{n}", 1.0, 0, (inside, Kept(10, n + 1, n + 1, True))) for n in range(9)]
        >>> plan = plan_segments(steps, segments=3, batch_size=1)
        >>> plan.cuts, plan.activation_bytes, plan.plain_activation_bytes
        (('dense_2', 'dense_5'), 330, 910)
    """
    table = Table.of(steps)
    budget = None if target_bytes is None else target_bytes - persistent_bytes
    cuts: list[Cut] | None
    if segments != AUTO:
        most = len(table.places) - 1
        cuts = lowest_peak(table, whole("segments", segments, most=most))
    elif budget is not None:
        cuts = cheapest(table, budget)
    else:
        cuts = lowest_peak(table)
    lowest = max(peak for _, peak in table.peak_of(cuts or lowest_peak(table)))
    if budget is not None and (cuts is None or lowest > budget):
        raise UsageError(
            f"memory {format_size(target_bytes or 0)}: even cut {'at the best places' if segments == AUTO else 'so'} "
            f"the step needs about {format_size(round(lowest) + persistent_bytes)} at batch {batch_size:,}, "
            f"{format_size(persistent_bytes)} of it weights, optimizer and batch; take a smaller batch"
        )
    return described(steps, cuts or [], batch_size, persistent_bytes, target_bytes)


def described(
    steps: Sequence[Step], cuts: Sequence[Cut], batch_size: int, persistent_bytes: int, target_bytes: int | None
) -> RecomputePlan:
    """Return the plan of given cuts, with its predicted bytes and time."""
    table = Table.of(steps, sorted({0, len(steps), *(place for place, _ in cuts)}))
    begins = [0, *(place for place, _ in cuts)]
    parts, twice = [], 0.0
    for begin, (end, again), (held, peak) in zip(begins, cuts, table.peak_of(cuts), strict=False):
        twice += sum(each.seconds for each in steps[begin:end]) if again else 0.0
        parts.append(PlannedSegment(steps[begin].name, steps[end - 1].name, again, round(held), round(peak)))
    forward = sum(each.seconds for each in steps)
    return RecomputePlan(
        batch_size=batch_size,
        segments=tuple(parts),
        activation_bytes=max(each.peak_bytes for each in parts),
        plain_activation_bytes=round(table.peak_of([(len(steps), False)])[0][1]),
        persistent_bytes=persistent_bytes,
        extra_time=round(twice / (3 * forward), 4) if forward else 0.0,
        target_bytes=target_bytes,
    )


def uncut(plan: RecomputePlan) -> RecomputePlan:
    """Return the plan of the same model that recomputes nothing."""
    first, last = plan.segments[0], plan.segments[-1]
    peak = plan.plain_activation_bytes
    whole = PlannedSegment(first.first, last.last, recomputed=False, held_bytes=peak, peak_bytes=peak)
    return replace(plan, segments=(whole,), activation_bytes=peak, extra_time=0.0)
