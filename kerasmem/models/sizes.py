"""Sizes in bytes: of elements, variables, and the model and layers of a report. Without Keras."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kerasmem.records import renamed

# tf.string: an element is a small structure, the text beyond 22 bytes lies elsewhere.
_STRING_BYTES = 24
_SPECIAL = {"bool": 1, "string": _STRING_BYTES, "complex64": 8, "complex128": 16, "int4": 1, "uint4": 1}


def element_bytes(dtype: str) -> int:
    """Return the bytes that one element of a Keras dtype takes in memory: 2 for "bfloat16".

    Examples:
        >>> element_bytes("float32"), element_bytes("uint8")
        (4, 1)
    """
    if dtype in _SPECIAL:
        return _SPECIAL[dtype]
    digits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz").split("_")[0].split("e")[0]
    return max(int(digits) // 8, 1)


def variable_bytes(variable: Any) -> int:
    """Return the bytes of a Keras variable's value."""
    return math.prod(variable.shape) * element_bytes(str(variable.dtype))


@dataclass(frozen=True)
class ModelFacts:
    """The model: name, origin, layers and parameters (counts)."""

    name: str
    source: str
    layers: int
    parameters: int
    trainable_parameters: int


@dataclass(frozen=True)
class Bytes:
    """The peak in bytes, and its parts: what is held at that moment.

    Attributes:
        total: in use at the peak.
        low, high: the interval that the method claims; None if it knows no such end.
        weights, optimizer, gradients, inputs, workspace: parts of the total; None if unknown to the method.
        activations: activations held at the peak. `formula.activation_bytes` has those of all layers together.
        allocator: waste in the allocator's chunks.
        optional_workspace: part of `high` that cuDNN takes only while memory is free. A step does without, so a verdict
            does not count it.
    """

    total: int
    low: int | None
    high: int | None
    weights: int | None = None
    optimizer: int | None = None
    gradients: int | None = None
    activations: int | None = None
    inputs: int | None = None
    workspace: int | None = None
    allocator: int | None = None
    optional_workspace: int | None = field(default=None, kw_only=True)

    CATEGORIES: ClassVar[tuple[str, ...]] = (
        "weights", "optimizer", "gradients", "activations", "inputs", "workspace", "allocator",
    )  # fmt: skip

    @property
    def most_needed(self) -> int | None:
        """The upper end without the optional workspace; a verdict compares it with the card."""
        return None if self.high is None else self.high - (self.optional_workspace or 0)

    @property
    def bounds(self) -> tuple[int, int | None]:
        """Both ends of the bytes that a step must have; the total if the method claims no interval."""
        return (self.total, self.total) if self.low is None else (self.low, self.most_needed)


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """One layer.

    Attributes:
        name: the path of names through nested models, joined by "/".
        class_name: the layer's class ("class" in JSON).
        output_shape: of its first output, None for the batch; None if unknown.
        parameters: numbers in its weights, each weight counted in the first layer that has it.
        trainable_parameters: those of them that are trained.
        activation_elements: output elements for one sample, over all uses; 0 for a view, None if unknown.
        activation_bytes: the same in bytes at the true dtype, for one sample.
        weight_bytes: its weights in bytes at their true dtype.
        dtype: of its first output.
        uses: how often the model calls it.
        kind: "input", "layer" or "view".
        inputs: the names of the layers whose outputs it takes, if known.
        bytes: its part of the report's total, if the method divides the total by layer.
        bytes_at_peak: its bytes at the peak, if the method knows.
    """

    name: str
    class_name: str = renamed("class")
    output_shape: tuple[int | None, ...] | None
    parameters: int = 0
    activation_elements: int | None = None
    bytes_at_peak: int | None = None
    bytes: int | None = None
    trainable_parameters: int = 0
    activation_bytes: int | None = None
    weight_bytes: int = 0
    dtype: str | None = None
    uses: int = 1
    kind: str = "layer"
    inputs: tuple[str, ...] = ()
