"""The memory of one profiled step at its peak, in the layout of an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kerasmem.models.op_names import Instant
from kerasmem.models.sizes import Bytes, LayerMemory, ModelFacts
from kerasmem.records import Record
from kerasmem.units import format_size

METHOD = "profile"


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of the step. `execution` is "graph", "xla" or "none"."""

    batch_size: int
    optimizer: str | None
    loss: str | None
    dtype_policy: str
    mode: str
    execution: str
    device: str | None
    method: str = METHOD


@dataclass(frozen=True)
class PeakBytes(Bytes):
    """The peak in bytes and its parts. The categories and `unnamed` add up to `total`.

    Attributes:
        total: all chunks that the allocator had handed out.
        low: the least peak of the steps that ran.
        high: the most.
        weights: variables of the model and its metrics.
        optimizer: the optimizer's variables.
        gradients: results of the backward pass.
        activations: results of the forward pass, loss included.
        inputs: the batch.
        workspace: scratch memory of operations, the optimizer's included, and constants of the step.
        allocator: bytes of chunks beyond the requests.
        unnamed: chunks of unknown purpose.
    """

    unnamed: int = 0

    CATEGORIES: ClassVar[tuple[str, ...]] = (*Bytes.CATEGORIES, "unnamed")


@dataclass(frozen=True, kw_only=True)
class ProfiledLayer(LayerMemory):
    """One layer: its facts as in an estimate, and its memory at the peak.

    Attributes:
        bytes_at_peak: bytes requested on its behalf and live at the peak.
        bytes: the same again, as estimates have it.
        parts: the same by category.
    """

    bytes_at_peak: int = 0
    bytes: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """A part without a layer: "optimizer", "loss", "batch", "waste in chunks", …, and its bytes at the peak."""

    name: str
    bytes: int


@dataclass(frozen=True)
class TimelinePoint:
    """An instant of the step: microseconds from its begin, bytes in use then, and the operation that ran ("": none)."""

    time_us: float
    bytes: int
    operation: str


@dataclass(frozen=True)
class LiveChunk:
    """A chunk that was live at the peak.

    Attributes:
        bytes: of the chunk.
        requested: the requested bytes among those.
        category: one of `PeakBytes.CATEGORIES`.
        layer: the layer that it belongs to, or None.
        what: the variable, or the operation that asked for it.
        shape: as TensorFlow writes it ("[32,10]"), or "".
    """

    bytes: int
    requested: int
    category: str
    layer: str | None
    what: str
    shape: str


@dataclass(frozen=True)
class StepProfile(Record, what="profile", version=1, also=("measured", "pool"), rows="layers"):
    """One real step: its memory at the peak by layer and category, and the timeline to it.

    `to_dict` gives the object that `kerasmem profile --json` prints, in the layout of an estimate's; `from_dict`
    reads it back.

    Attributes:
        model: the model.
        settings: how the step was run.
        bytes: the peak and its categories.
        layers: by layer; with `shares` they add up to `bytes.total`.
        shares: parts without a layer.
        instant: when the peak was reached; None if nothing was allocated.
        timeline: bytes in use over the step, thinned to at most 2,000 points of which the peak is one.
        live: the largest chunks at the peak, the largest first.
        live_chunks: how many chunks were live then (count).
        before: bytes in use when the step began.
        requested: bytes asked for, of those in use at the peak; None if chunks from before are unknown.
        events: allocations and frees in the step (count).
        notes: how it was measured.
        unmodelled: parts that could not be seen, and why.
        formula: the hand formula, as an estimate has it; None if the layers' outputs were not inferred.
    """

    model: ModelFacts
    settings: ProfileSettings
    bytes: PeakBytes
    layers: tuple[ProfiledLayer, ...]
    shares: tuple[Share, ...]
    instant: Instant | None
    timeline: tuple[TimelinePoint, ...]
    live: tuple[LiveChunk, ...]
    live_chunks: int
    before: int
    requested: int | None
    events: int
    notes: tuple[str, ...] = ()
    unmodelled: tuple[Mapping[str, Any], ...] = ()
    formula: Mapping[str, int] | None = None

    @property
    def peak(self) -> int:
        """The bytes in use at the step's peak: `bytes.total`."""
        return self.bytes.total

    @property
    def answer(self) -> str:
        """The model, and the peak of its step."""
        return f"{self.model.name} took {format_size(self.peak)} at the peak of a step"

    @property
    def measured(self) -> bool:
        """True: an estimate has no such field."""
        return True

    @property
    def named_share(self) -> float:
        """The share of the peak's bytes that have a layer or a category, from 0 to 1."""
        return 1 - self.bytes.unnamed / self.bytes.total if self.bytes.total else 1.0

    @property
    def pool(self) -> dict[str, int | None]:
        """Requested bytes and bytes in use, as an estimate has them; TensorFlow does not tell the reserved ones."""
        return {"requested": self.requested, "in_use": self.bytes.total, "reserved": None}

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON-ready data, sizes in integer bytes."""
        return {**super().to_dict(), "named_share": round(self.named_share, 6)}
