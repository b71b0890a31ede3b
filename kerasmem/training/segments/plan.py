"""What the planner decided, and what it predicts. Sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kerasmem.records import Record


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
    """

    first: str
    last: str
    recomputed: bool
    held_bytes: int
    peak_bytes: int
    flops: int


@dataclass(frozen=True)
class RecomputePlan(Record, what="recomputation plan", version=1, also=("predicted_bytes",)):
    """Where a model is cut, and what that is predicted to save and to cost.

    Attributes:
        batch_size: samples in a batch, for which all of it holds.
        segments: in the order of the model.
        activation_bytes: predicted peak of what the backward pass needs of the forward pass, with its own scratch.
        plain_activation_bytes: the same without recomputation.
        persistent_bytes: weights, their gradients, the optimizer's slots and the batch, which recomputation leaves as
            they are.
        forward_flops: of one forward pass: matrix products and convolutions.
        extra_flops: what is computed a second time.
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
    def cuts(self) -> tuple[str, ...]:
        """The layers after which a segment ends."""
        return tuple(each.last for each in self.segments[:-1])

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """For each segment whether it is recomputed."""
        return tuple(each.recomputed for each in self.segments)

    @property
    def predicted_bytes(self) -> int:
        """Predicted peak of a training step; `kerasmem.estimate` of the recomputed model says it more exactly."""
        return self.activation_bytes + self.persistent_bytes
