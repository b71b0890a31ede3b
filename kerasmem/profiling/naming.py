"""Each chunk that is live at the peak → the layer and the category that it belongs to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kerasmem.models.op_names import CATEGORIES, Attribution, Instant
from kerasmem.profiling.replaying import Chunk, KnownTensor

UNNAMED = "unnamed"
LOSS, METRICS, OPTIMIZER, BATCH = "loss", "metrics", "optimizer", "batch"
CONSTANTS, RUNTIME, NOT_KNOWN = "constants", "TensorFlow itself", "not known"
GRADIENT_SUMS, SCRATCH, OUTSIDE = "sums of gradients", "scratch of kernels", "the step outside its layers"
XLA_OWN, XLA_BUFFER = "rearranged by XLA", "XLA's buffer for the whole step"
# kind of a tensor → category, and the share of what belongs to no layer
_OF_KIND = {
    "weights": ("weights", "other weights"),
    "metrics": ("weights", METRICS),
    "optimizer": ("optimizer", OPTIMIZER),
    "inputs": ("inputs", BATCH),
    "constant": ("workspace", CONSTANTS),
}
_LARGEST_OF_RUNTIME = 64 * 1024  # bytes; TensorFlow's own objects are small, XLA's buffers are not
# What functions and kernels keep for themselves is named after the function that is called.
_FUNCTION = "__inference_"
_RUNTIME = ("VarHandleOp", "_Arg", "_Retval", "Const", _FUNCTION, "__forward_", "__backward_")
_CALL = "StatefulPartitionedCall/"  # of a function inside the one that `fit` calls
# Scopes in which Keras computes what belongs to no layer.
_SCOPES = {"compile_loss": LOSS, "loss": LOSS, "compile_metrics": METRICS, "metrics": METRICS}


@dataclass(frozen=True)
class Named:
    """A chunk, or a part of one, with its name.

    Attributes:
        bytes: of it, those asked for.
        category: of `PeakBytes.CATEGORIES`.
        layer: the row that it belongs to, or None.
        share: name of its share if it belongs to no layer.
        what: the variable, or the operation.
    """

    bytes: int
    category: str
    layer: str | None
    share: str
    what: str


@dataclass(frozen=True)
class Namer:
    """Names chunks.

    Attributes:
        attribution: of operations, by their names.
        contents: of chunks in which XLA keeps a whole step: bytes asked for → (bytes, operation) of what is in it.
        is_xla: XLA compiles the step.
        at: the operation that runs when most of XLA's buffer is in use.
    """

    attribution: Attribution
    contents: Mapping[int, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    at: str | None = None
    is_xla: bool = False

    def name(self, chunk: Chunk) -> Iterator[Named]:
        """Yield the parts of a chunk. Their bytes add up to the request."""
        if chunk.tensor is not None:
            held = self._held(chunk.tensor, min(chunk.tensor.bytes, chunk.requested))
            yield held
            if chunk.requested > held.bytes:  # TensorFlow's own header, or a view of a larger tensor
                yield Named(chunk.requested - held.bytes, held.category, held.layer, held.share, held.what)
            return
        inside = self.contents.get(chunk.requested) if chunk.is_new and _is_whole(chunk.operation) else None
        if inside is None:
            yield self._made(chunk)
            return
        left = chunk.requested
        for size, operation in inside:
            left -= size
            named = self._by_operation(size, operation, is_scratch=False)
            # Copies of arguments and what XLA lays out differently carry no operation's name.
            yield replace(named, category="workspace", share=XLA_OWN) if named.category == UNNAMED else named
        if left:
            yield Named(left, "workspace", None, "gaps in XLA's buffer", "between the values of XLA's plan")

    def instant(self, operation: str) -> Instant | None:
        """Describe the moment at which an operation runs, or return None."""
        plain = _inner(operation)
        if self.is_xla:
            if self.at is None:
                return Instant("while XLA runs the step", operation, None, None)
            plain = self.at
        if not plain:
            return None
        return replace(self.attribution.instant(plain), operation=operation)

    def _held(self, tensor: KnownTensor, size: int) -> Named:
        category, share = _OF_KIND[tensor.kind]
        layer = self.attribution.row(tensor.layer) if category == "weights" and tensor.layer else None
        return Named(size, category, layer, share if layer is None else "", tensor.name)

    def _made(self, chunk: Chunk) -> Named:
        name, size = chunk.operation, chunk.requested
        if chunk.is_new and self.is_xla and _is_whole(name) and size > _LARGEST_OF_RUNTIME:
            return Named(size, "workspace", None, XLA_BUFFER, name or XLA_BUFFER)
        if not name and chunk.is_new:  # kernels ask for memory to work in without saying for whom
            return Named(size, "workspace", None, SCRATCH, "a kernel's own scratch memory")
        if not name:
            return Named(size, UNNAMED, None, NOT_KNOWN, "an allocation outside of any operation")
        if name.startswith(_RUNTIME):
            return Named(size, "workspace", None, RUNTIME, name)
        if not chunk.is_new:  # kept from an earlier step: what TensorFlow computed once for all
            kept = self._by_operation(size, name, is_scratch=True)
            is_known = kept.category != UNNAMED
            return replace(kept, share=CONSTANTS) if is_known and kept.layer is None else kept
        is_scratch = chunk.region == "temp"
        named = self._by_operation(size, name, is_scratch)
        # Gradients that Keras or TensorFlow define by hand (swish, loops) are made outside any scope.
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
    """Return whether an allocation is made for a whole function: XLA's executable says no more than that."""
    return not operation or operation.startswith(_FUNCTION)


def _inner(operation: str) -> str:
    """Return the name that an operation has in its own function."""
    while operation.startswith(_CALL):
        operation = operation[len(_CALL) :]
    return operation
