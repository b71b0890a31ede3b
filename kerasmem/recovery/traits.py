"""What of a model decides which changes are worth considering, and how a script for it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.errors import KerasmemError
from kerasmem.models.backend import import_keras
from kerasmem.models.batch import output_spec, step_targets
from kerasmem.models.inputs import model_inputs, normalise_input_shapes
from kerasmem.models.own_step import has_own_step
from kerasmem.models.training import with_replaced
from kerasmem.models.weightless import random_state_kept, weightless
from kerasmem.recovery.building import Origin, build
from kerasmem.recovery.changes import Change, change
from kerasmem.recovery.source_text import arrays_text
from kerasmem.recovery.transforms import head_start, is_mixing, is_rebuilt, takes_lora, transformed

Sizes = list[list[int]]  # a shape for each input, without the batch
LORA_RANK = 8
# An input this long is cut to a multiple of so much: what a network halves again and again stays whole.
_MULTIPLES = ((128, 32), (32, 8), (8, 2))
_SHRINK = 0.7  # each side; half the area


class Traits:
    """What a model is, opened without weights, as far as advice and scripts depend on it.

    Args:
        origin: how the user gave the model.
        batch_size: samples in a batch.
        jit_compile: as the user gave it, "auto" to leave it to Keras.
        mode: "train", "evaluate" or "inference".

    Attributes:
        model: without weights.
        training: the settings of its `compile`.
        structure: of its inputs.
        inputs: flat.
        targets: of a step as Python, for the model as it is and for smaller inputs; None where the step takes none.
        has_own_step: its class brings a training step.
        has_batch_norm: it normalises by the statistics of a batch.
        is_graph: Keras can rebuild it from its layers.
        has_embedding: it has an embedding.
        is_double: something in it is float64.
        has_mixing: it has convolutions that separable ones can stand in for.
        head_start: where the head begins in its layers; 0: there is no backbone.
        can_lora: a layer of the backbone can train thin factors in place of its kernel.
        smaller_inputs: the shapes of smaller inputs, without the batch; empty where there are none.
        why_not_smaller: why there is none.

    Raises:
        KerasmemError: the model cannot be opened or compiled.
    """

    def __init__(self, origin: Origin, batch_size: int, jit_compile: bool | str, mode: str = "train") -> None:
        self.origin, self.batch_size, self.jit_compile, self.mode = origin, batch_size, jit_compile, mode
        keras = import_keras()
        with random_state_kept(), weightless():
            with origin.opened() as opened:
                self.training = with_replaced(opened.training, origin.optimizer, origin.loss, origin.targets)
            self.model = model = build(origin, [])
            self.structure, self.inputs = model_inputs(model, normalise_input_shapes(origin.input_shape))
            self.has_own_step, self.is_graph = has_own_step(model), is_rebuilt(model)
            layers = flatten_layers(model)
            self.has_batch_norm = any(isinstance(each, keras.layers.BatchNormalization) for each in layers)
            self.has_embedding = any(isinstance(each, keras.layers.Embedding) for each in layers)
            self.has_mixing = any(map(is_mixing, layers))
            self.is_double = "float64" in {
                *(each.dtype for each in self.inputs), *(each.dtype_policy.name for each in layers)
            }  # fmt: skip
            start = head_start(model) if list(getattr(model, "layers", ())) else 0
            backbone = [inner for layer in list(model.layers)[:start] for inner in flatten_layers(layer)]
            self.head_start = start if any(layer.weights for layer in backbone) else 0
            self.can_lora = any(takes_lora(each, LORA_RANK) for each in backbone)
            self.smaller_inputs, self.why_not_smaller = _smaller_model(model, self.inputs)
            now = self._targets(None)
            self.targets = (now, self._targets(self.smaller_inputs) if self.smaller_inputs else now)

    def change(self, kind: str, value: Any) -> Change:
        """Return a change with words that hold for this model."""
        return change(kind, value, has_batch_norm=self.has_batch_norm, batch_size=self.batch_size)

    def _targets(self, sizes: Sizes | None) -> str | None:
        """Return the targets of a step on inputs of these sizes as Python; None where the step takes none."""
        model = self.model

        def outputs() -> Any:
            built = transformed(model, change("input_size", sizes)) if sizes else model
            return output_spec(built, self.structure, batch_tensors(self.inputs, self.batch_size, sizes))

        labels = step_targets(model, self.training.targets, outputs, self.batch_size)
        return (
            None
            if labels is None
            else arrays_text(labels, import_keras().tree.flatten(labels), str(2 * self.batch_size))
        )


def batch_tensors(inputs: Sequence[Any], batch_size: int, sizes: Sizes | None = None) -> list[Any]:
    """Return a batch of the inputs, or of inputs of other sizes, as Keras's symbolic tensors."""
    shapes = sizes or [each.shape[1:] for each in inputs]
    make = import_keras().KerasTensor
    return [make((batch_size, *shape), str(each.dtype)) for each, shape in zip(inputs, shapes, strict=True)]


def _smaller_model(model: Any, inputs: list[Any]) -> tuple[Sizes, str]:
    """Return the shapes of smaller inputs that the model can be built for, or why there are none."""
    found = smaller_shapes([each.shape[1:] for each in inputs])
    if found == [list(each.shape[1:]) for each in inputs]:
        return [], "its inputs have no side or length that could be smaller"
    try:
        transformed(model, change("input_size", found))
    except KerasmemError as error:
        return [], str(error)
    return found, ""


def smaller_shapes(shapes: Sequence[Sequence[int]]) -> Sizes:
    """Return shapes with shorter sides of images and volumes and shorter sequences, the batch left out.

    Examples:
        >>> smaller_shapes([(224, 224, 3), (1,)])
        [[160, 160, 3], [1]]
    """
    channels_first = import_keras().config.image_data_format() == "channels_first"
    found = []
    for shape in shapes:
        channel = None if len(shape) == 1 else 0 if channels_first else len(shape) - 1
        found.append([size if place == channel else _cut(size) for place, size in enumerate(shape)])
    return found


def _cut(size: int) -> int:
    multiple = next((step for least, step in _MULTIPLES if size >= least), None)
    return size if multiple is None else max(round(size * _SHRINK / multiple), 1) * multiple
