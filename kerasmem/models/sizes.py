"""Sizes in bytes of elements and variables, and the records of a report on the model and its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kerasmem.records import json_field

# An element of tf.string; text beyond 22 bytes is stored elsewhere.
_SPECIAL = {"bool": 1, "string": 24, "complex64": 8, "complex128": 16, "int4": 1, "uint4": 1}


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of a Keras dtype.

    Examples:
        >>> element_bytes("float32"), element_bytes("uint8")
        (4, 1)
    """
    if dtype in _SPECIAL:
        return _SPECIAL[dtype]
    digits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz").split("_")[0].split("e")[0]
    return max(int(digits) // 8, 1)


def variable_bytes(variable: Any) -> int:
    """Return the bytes of a Keras variable."""
    return math.prod(variable.shape) * element_bytes(str(variable.dtype))


@dataclass(frozen=True)
class ModelFacts:
    """Name and origin of a model, and its numbers of layers and parameters."""

    name: str
    source: str
    layers: int
    parameters: int
    trainable_parameters: int


@dataclass(frozen=True)
class Bytes:
    """Peak memory in bytes, and its parts at that moment.

    Attributes:
        total: bytes in use at the peak.
        low, high: bounds of the peak; None if unknown.
        weights, optimizer, gradients, inputs, workspace: parts of the total; None if unknown.
        activations: activations in memory at the peak. `formula.activation_bytes` has those of all layers.
        allocator: waste in the allocator's chunks.
        optional_workspace: part of `high` that cuDNN uses only if memory is free. Verdicts ignore it.
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
        """Upper bound without the optional workspace, for verdicts."""
        return None if self.high is None else self.high - (self.optional_workspace or 0)

    @property
    def bounds(self) -> tuple[int, int | None]:
        """Bounds of the bytes that a step needs, or the total twice if they are unknown."""
        return (self.total, self.total) if self.low is None else (self.low, self.most_needed)


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Memory of one layer.

    Attributes:
        name: names of the nested models and the layer, joined by "/".
        class_name: the layer's class ("class" in JSON).
        output_shape: shape of its first output, with None for the batch; None if unknown.
        parameters: number of its parameters. A shared weight counts in its first layer.
        trainable_parameters: number of its trainable parameters.
        activation_elements: output elements per sample, over all uses; 0 for a view, None if unknown.
        activation_bytes: output bytes per sample, over all uses.
        weight_bytes: bytes of its weights.
        dtype: dtype of its first output.
        uses: number of calls in the model.
        kind: "input", "layer" or "view".
        inputs: names of the layers before it, if known.
        bytes: its share of the report's total; None if the method does not divide the total by layer.
        bytes_at_peak: its bytes at the peak; None if unknown.
    """

    name: str
    class_name: str = json_field("class")
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
