"""The profile of a recorded step: chunks in use at the peak, by layer and category."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.models.op_names import CATEGORIES, Attribution, Instant
from kerasmem.models.sizes import ModelFacts
from kerasmem.profiling.replaying import AllocatedChunk, KnownTensor, StepReplay, thin_timeline
from kerasmem.profiling.results import LiveChunk, PeakBytes, PeakShare, ProfiledLayer, ProfileSettings, StepProfile

UNNAMED = "unnamed"
LOSS, METRICS, OPTIMIZER, BATCH = "loss", "metrics", "optimizer", "batch"
CONSTANTS, RUNTIME, NOT_KNOWN = "constants", "TensorFlow itself", "not known"
GRADIENT_SUMS, SCRATCH, OUTSIDE = "sums of gradients", "scratch of kernels", "the step outside its layers"
XLA_OWN, XLA_BUFFER = "rearranged by XLA", "XLA's buffer for the whole step"
# By kind of tensor: its category, and its share if it belongs to no layer.
_OF_KIND = {
    "weights": ("weights", "other weights"),
    "metrics": ("weights", METRICS),
    "optimizer": ("optimizer", OPTIMIZER),
    "inputs": ("inputs", BATCH),
    "constant": ("workspace", CONSTANTS),
}
_LARGEST_OF_RUNTIME = 64 * 1024  # bytes; TensorFlow's own objects are small, XLA's buffers are not
# Memory of functions and kernels themselves has the name of the called function.
_FUNCTION = "__inference_"
_RUNTIME = ("VarHandleOp", "_Arg", "_Retval", "Const", _FUNCTION, "__forward_", "__backward_")
_CALL = "StatefulPartitionedCall/"  # of a function inside the one that `fit` calls
# Scopes in which Keras computes values without a layer.
_SCOPES = {"compile_loss": LOSS, "loss": LOSS, "compile_metrics": METRICS, "metrics": METRICS}


@dataclass(frozen=True)
class Named:
    """A chunk, or a part of one, with its origin.

    Attributes:
        bytes: requested bytes.
        category: one of `PeakBytes.CATEGORIES`.
        layer: name of its row, or None.
        share: name of its share if it belongs to no layer.
        what: variable or operation.
    """

    bytes: int
    category: str
    layer: str | None
    share: str
    what: str


@dataclass(frozen=True)
class Namer:
    """Finds the origins of chunks.

    Attributes:
        attribution: origins of operations.
        contents: (bytes, operation) of the values in XLA's buffer for a whole step, by the buffer's requested bytes.
        is_xla: whether XLA compiles the step.
        at: operation that runs when most of XLA's buffer is in use, if known.
    """

    attribution: Attribution
    contents: Mapping[int, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    at: str | None = None
    is_xla: bool = False

    def name(self, chunk: AllocatedChunk) -> Iterator[Named]:
        """Yield the parts of a chunk. Their bytes add up to the request."""
        if chunk.tensor is not None:
            named = self._tensor(chunk.tensor, min(chunk.tensor.bytes, chunk.requested))
            yield named
            if chunk.requested > named.bytes:  # TensorFlow's own header, or a view of a larger tensor
                yield replace(named, bytes=chunk.requested - named.bytes)
            return
        inside = self.contents.get(chunk.requested) if chunk.is_new and _is_whole(chunk.operation) else None
        if inside is None:
            yield self._allocation(chunk)
            return
        gaps = chunk.requested
        for size, operation in inside:
            gaps -= size
            named = self._by_operation(size, operation, is_scratch=False)
            # Copies of arguments, and values in another layout, have no operation.
            yield replace(named, category="workspace", share=XLA_OWN) if named.category == UNNAMED else named
        if gaps:
            yield Named(gaps, "workspace", None, "gaps in XLA's buffer", "between the values of XLA's plan")

    def instant(self, operation: str) -> Instant | None:
        """Describe the moment of an operation, if any."""
        plain = _inner(operation)
        if self.is_xla:
            if self.at is None:
                return Instant("while XLA runs the step", operation, None, None)
            plain = self.at
        if not plain:
            return None
        return replace(self.attribution.instant(plain), operation=operation)

    def _tensor(self, tensor: KnownTensor, size: int) -> Named:
        category, share = _OF_KIND[tensor.kind]
        layer = self.attribution.row(tensor.layer) if category == "weights" and tensor.layer else None
        return Named(size, category, layer, share if layer is None else "", tensor.name)

    def _allocation(self, chunk: AllocatedChunk) -> Named:
        name, size = chunk.operation, chunk.requested
        if chunk.is_new and self.is_xla and _is_whole(name) and size > _LARGEST_OF_RUNTIME:
            return Named(size, "workspace", None, XLA_BUFFER, name or XLA_BUFFER)
        if not name and chunk.is_new:  # kernels' own threads request scratch without an operation
            return Named(size, "workspace", None, SCRATCH, "a kernel's own scratch memory")
        if not name:
            return Named(size, UNNAMED, None, NOT_KNOWN, "an allocation outside of any operation")
        if name.startswith(_RUNTIME):
            return Named(size, "workspace", None, RUNTIME, name)
        if not chunk.is_new:  # from an earlier step: values that TensorFlow computes once
            constant = self._by_operation(size, name, is_scratch=True)
            is_known = constant.category != UNNAMED
            return replace(constant, share=CONSTANTS) if is_known and constant.layer is None else constant
        is_scratch = chunk.region == "temp"
        named = self._by_operation(size, name, is_scratch)
        # Custom gradients of Keras and TensorFlow (swish, loops) are computed outside any scope.
        outside = replace(named, category="workspace" if is_scratch else "activations", share=OUTSIDE)
        return outside if named.category == UNNAMED else named

    def _by_operation(self, size: int, name: str, is_scratch: bool) -> Named:
        origin = self.attribution.origin(name)
        category = "workspace" if is_scratch else CATEGORIES[origin.phase]
        if origin.layer is not None:
            return Named(size, category, origin.layer, "", name)
        if origin.phase == "optimizer":
            return Named(size, category, None, OPTIMIZER, name)
        for part in name.split("/"):
            if part in _SCOPES:
                return Named(size, category, None, _SCOPES[part], name)
        if path := self.attribution.path(name):
            return Named(size, category, None, f"{'/'.join(path)} outside its layers", name)
        if origin.phase == "backward":
            return Named(size, category, None, GRADIENT_SUMS, name)
        return Named(size, UNNAMED, None, NOT_KNOWN, name)


def _is_whole(operation: str) -> bool:
    """Return whether an allocation belongs to a whole function. XLA's executables name no operation."""
    return not operation or operation.startswith(_FUNCTION)


def _inner(operation: str) -> str:
    """Return an operation's name in its own function."""
    while operation.startswith(_CALL):
        operation = operation[len(_CALL) :]
    return operation


WASTE = "waste in chunks"
MOST_LIVE = 200


def build_profile(
    replay: StepReplay,
    namer: Namer,
    model: ModelFacts,
    settings: ProfileSettings,
    rows: Sequence[ProfiledLayer],
    *,
    peaks: Sequence[int] = (),
    notes: Sequence[str] = (),
    formula: Mapping[str, int] | None = None,
) -> StepProfile:
    """Build the profile of a recorded step.

    Args:
        replay: the replayed step.
        namer: finds the origins of its chunks.
        model: facts of the model.
        settings: settings of the step.
        rows: layers in the order of the report.
        peaks: peaks of all recorded steps in bytes, for `low` and `high`. Defaults to none.
        notes: how the step was measured. Defaults to none.
        formula: figures of the hand formula. Defaults to None.
    """
    named = [(chunk, list(namer.name(chunk))) for chunk in replay.live]
    categories: Counter[str] = Counter({UNNAMED: replay.unknown})
    shares: Counter[str] = Counter({NOT_KNOWN: replay.unknown})
    layers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    known_rows = {row.name for row in rows}
    for chunk, parts in named:
        waste = chunk.allocated - sum(part.bytes for part in parts)
        categories["allocator"] += waste
        shares[WASTE] += waste
        for part in parts:
            categories[part.category] += part.bytes
            if part.layer in known_rows:
                layers[str(part.layer)][part.category] += part.bytes
            else:
                shares[part.share or str(part.layer)] += part.bytes
    unmodelled: list[Mapping[str, Any]] = []
    if replay.unknown:
        why = "in use when the step began; not recorded, and no variable of the model or its optimizer"
        unmodelled.append({"what": "chunks from before the step", "why": why, "bytes": replay.unknown})
    requested = None if replay.unknown else sum(chunk.requested for chunk in replay.live)
    return StepProfile(
        model=model,
        settings=settings,
        bytes=PeakBytes(
            replay.peak, min(peaks, default=None), max(peaks, default=None),
            **{name: categories[name] for name in PeakBytes.CATEGORIES},
        ),
        layers=tuple(_fill(row, layers[row.name]) for row in rows),
        shares=tuple(PeakShare(name, size) for name, size in shares.most_common() if size),
        instant=namer.instant(replay.operation),
        timeline=thin_timeline(replay.points),
        live=_largest(named),
        live_chunks=len(replay.live),
        before=replay.begin,
        requested=requested,
        events=len(replay.points) - 1,
        notes=tuple(notes),
        unmodelled=tuple(unmodelled),
        formula=formula,
    )  # fmt: skip


def _fill(row: ProfiledLayer, parts: Counter[str]) -> ProfiledLayer:
    total = sum(parts.values())
    return replace(row, bytes_at_peak=total, bytes=total, parts={name: size for name, size in parts.items() if size})


def _largest(named: Sequence[tuple[AllocatedChunk, list[Named]]]) -> tuple[LiveChunk, ...]:
    largest = []
    for chunk, parts in named:
        waste = chunk.allocated - sum(part.bytes for part in parts)
        shape = chunk.shape or ("" if chunk.tensor is None else chunk.tensor.shape)
        for part in parts:
            is_alone = len(parts) == 1
            size = part.bytes + (waste if is_alone else 0)
            largest.append(LiveChunk(size, part.bytes, part.category, part.layer, part.what, shape if is_alone else ""))
        if len(parts) > 1 and waste:
            largest.append(LiveChunk(waste, 0, "allocator", None, f"waste in a chunk of {len(parts)} values", ""))
    largest.sort(key=lambda chunk: -chunk.bytes)
    return tuple(largest[:MOST_LIVE])
