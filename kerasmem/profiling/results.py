"""The profile of a step: its memory at the peak, in the layout of an estimate."""

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
    """Settings of the step, as in an estimate. `execution` is "graph", "xla" or "none"."""

    batch_size: int
    optimizer: str | None
    loss: str | None
    dtype_policy: str
    mode: str
    execution: str
    device: str | None
    method: str = METHOD
    kernels: str | None = None
    threads: int | None = None
    intra_op_threads: int | None = None
    stands_in: bool = False


@dataclass(frozen=True)
class PeakBytes(Bytes):
    """The peak in bytes and its parts. The categories and `unnamed` add up to `total`.

    Attributes:
        total: bytes of all chunks in use.
        low: the lowest peak of the recorded steps.
        high: the highest peak of the recorded steps.
        weights: variables of the model and its metrics.
        optimizer: the optimizer's variables.
        gradients: results of the backward pass.
        activations: results of the forward pass, loss included.
        inputs: the batch.
        workspace: scratch of operations, the optimizer's included, and constants of the step.
        allocator: bytes of chunks beyond the requests.
        unnamed: chunks of unknown origin.
    """

    unnamed: int = 0

    CATEGORIES: ClassVar[tuple[str, ...]] = (*Bytes.CATEGORIES, "unnamed")


@dataclass(frozen=True, kw_only=True)
class ProfiledLayer(LayerMemory):
    """A layer as in an estimate, with its memory at the peak.

    Attributes:
        bytes_at_peak: its requested bytes at the peak.
        bytes: the same, as in estimates.
        parts: the same by category.
    """

    bytes_at_peak: int = 0
    bytes: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PeakShare:
    """Bytes at the peak without a layer: "optimizer", "loss", "batch", "waste in chunks", …"""

    name: str
    bytes: int


@dataclass(frozen=True)
class TimelinePoint:
    """Bytes in use at an instant of the step, and its operation or ""."""

    time_us: float
    bytes: int
    operation: str


@dataclass(frozen=True)
class LiveChunk:
    """A chunk in use at the peak.

    Attributes:
        bytes: size of the chunk.
        requested: requested bytes.
        category: one of `PeakBytes.CATEGORIES`.
        layer: its layer, or None.
        what: the variable, or the operation that requested it.
        shape: TensorFlow's text of the shape ("[32,10]"), or "".
    """

    bytes: int
    requested: int
    category: str
    layer: str | None
    what: str
    shape: str


@dataclass(frozen=True)
class StepProfile(Record, what="profile", version=1, also=("measured", "pool"), rows="layers"):
    """The memory of a real step at its peak, and the timeline to it.

    `to_dict` gives the object that `kerasmem profile --json` prints, in the layout of an estimate's; `from_dict`
    reads it back.

    Attributes:
        model: the model.
        settings: settings of the step.
        bytes: the peak and its categories.
        layers: memory by layer; with `shares` it adds up to `bytes.total`.
        shares: memory without a layer.
        instant: the moment of the peak, or None if nothing was allocated.
        timeline: bytes in use over the step, at most 2,000 points, with the peak.
        live: the 200 largest chunks at the peak, the largest first.
        live_chunks: number of chunks at the peak.
        before: bytes in use when the step began.
        requested: requested bytes at the peak, or None if chunks from before the step are unknown.
        events: number of allocations and frees in the step.
        notes: how the step was measured.
        unmodelled: memory of unknown origin, and why.
        formula: figures of the hand formula as in an estimate, if known.
    """

    model: ModelFacts
    settings: ProfileSettings
    bytes: PeakBytes
    layers: tuple[ProfiledLayer, ...]
    shares: tuple[PeakShare, ...]
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
        """True. Estimates lack this field."""
        return True

    @property
    def named_share(self) -> float:
        """Share of the peak's bytes with a layer or a category, from 0 to 1."""
        return 1 - self.bytes.unnamed / self.bytes.total if self.bytes.total else 1.0

    @property
    def pool(self) -> dict[str, int | None]:
        """Requested bytes and bytes in use. TensorFlow does not record the reserved ones."""
        return {"requested": self.requested, "in_use": self.bytes.total, "reserved": None}

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON-ready data, sizes in integer bytes."""
        return {**super().to_dict(), "named_share": round(self.named_share, 6)}
