"""What of a model decides which changes are worth considering, and how a script for it is written."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.errors import KerasmemError
from kerasmem.models.backend import import_keras
from kerasmem.models.batch import output_spec, target_spec
from kerasmem.models.compiling import has_own_step
from kerasmem.models.inputs import model_inputs, normalise_input_shapes
from kerasmem.models.training import with_replaced
from kerasmem.models.weightless import weightless
from kerasmem.recovery.building import Origin, build
from kerasmem.recovery.changes import Change, change
from kerasmem.recovery.script import ScriptParts, Sizes, batch_tensors
from kerasmem.recovery.source_text import arrays_text
from kerasmem.recovery.transforms import head_start, is_mixing, is_rebuilt, takes_lora, transformed

LORA_RANK = 8
# An input this long is cut to a multiple of so much: what a network halves again and again stays whole.
_MULTIPLES = ((128, 32), (32, 8), (8, 2))
_SHRINK = 0.7  # each side; half the area


@dataclass(frozen=True)
class Traits:
    """What a model is, as far as advice depends on it.

    Attributes:
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
        parts: of a script.
    """

    has_own_step: bool
    has_batch_norm: bool
    is_graph: bool
    has_embedding: bool
    is_double: bool
    has_mixing: bool
    head_start: int
    can_lora: bool
    smaller_inputs: Sizes
    why_not_smaller: str
    parts: ScriptParts

    def change(self, kind: str, value: Any) -> Change:
        """Return a change with words that hold for this model."""
        return change(kind, value, has_batch_norm=self.has_batch_norm, batch_size=self.parts.batch_size)


def traits_of(origin: Origin, batch_size: int, jit_compile: bool | str, mode: str = "train") -> Traits:
    """Open a model without weights and return what advice depends on.

    Raises:
        KerasmemError: it cannot be opened or compiled.
    """
    keras = import_keras()
    with _random_state_kept(), weightless():
        with origin.opened() as opened:
            training = opened.training
        model = build(origin, [])
        layers = flatten_layers(model)
        structure, inputs = model_inputs(model, normalise_input_shapes(origin.input_shape))
        start = head_start(model) if list(getattr(model, "layers", ())) else 0
        backbone = [inner for layer in list(model.layers)[:start] for inner in flatten_layers(layer)]
        is_graph = is_rebuilt(model)
        smaller, why = _smaller_model(model, inputs)
        now = _targets(model, structure, inputs, batch_size)
        targets = (now, _targets(model, structure, inputs, batch_size, smaller) if smaller else now)
        return Traits(
            has_own_step=has_own_step(model),
            has_batch_norm=any(isinstance(each, keras.layers.BatchNormalization) for each in layers),
            is_graph=is_graph,
            has_embedding=any(isinstance(each, keras.layers.Embedding) for each in layers),
            is_double=any(each.dtype == "float64" for each in inputs)
            or any(each.dtype_policy.name == "float64" for each in layers),
            has_mixing=any(is_mixing(each) for each in layers),
            head_start=start if any(layer.weights for layer in backbone) else 0,
            can_lora=any(takes_lora(each, LORA_RANK) for each in backbone),
            smaller_inputs=smaller,
            why_not_smaller=why,
            parts=ScriptParts(
                origin,
                model,
                with_replaced(training, origin.optimizer, origin.loss),
                structure,
                tuple(inputs),
                targets,
                start,
                batch_size,
                jit_compile,
                mode,
            ),
        )


def _targets(model: Any, structure: Any, inputs: list[Any], batch_size: int, sizes: Sizes | None = None) -> str | None:
    """Return the targets of a step as Python; None where the step takes none."""
    if model.loss is None and has_own_step(model):
        return None
    built = transformed(model, change("input_size", sizes)) if sizes else model
    outputs = output_spec(built, structure, batch_tensors(inputs, batch_size, sizes))
    labels = target_spec(model.loss, outputs, batch_size)
    return arrays_text(labels, import_keras().tree.flatten(labels), str(2 * batch_size))


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave the user's random numbers as they are: Keras draws seeds from Python's."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


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

    Example:
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
