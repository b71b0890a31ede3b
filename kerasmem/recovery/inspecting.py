"""What of a model decides which changes are worth considering, and how a script for it is written."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.errors import KerasmemError
from kerasmem.models.backend import import_keras
from kerasmem.models.batch import output_spec, target_spec
from kerasmem.models.compiling import has_own_step
from kerasmem.models.inputs import model_inputs, normalise_input_shapes
from kerasmem.models.weightless import weightless
from kerasmem.recovery.building import Origin, build
from kerasmem.recovery.changes import Change, change
from kerasmem.recovery.script import ScriptParts
from kerasmem.recovery.spelling import arrays_text, loss_text, metrics_text, opening_lines, optimizer_text
from kerasmem.recovery.transforms import head_start, input_name, is_mixing, is_rebuilt, takes_lora, transformed

LORA_RANK = 8
# An input this long is cut to a multiple of so much: what a network halves again and again stays whole.
_MULTIPLES = ((128, 32), (32, 8), (8, 2))
_SHRINK = 0.7  # each side; half the area


@dataclass(frozen=True)
class Facts:
    """What a model is, as far as advice depends on it.

    Attributes:
        has_own_step: its class brings a training step.
        has_batch_norm: it normalises by the statistics of a batch.
        is_graph: Keras can build it anew from its layers.
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
    smaller_inputs: list[list[int]]
    why_not_smaller: str
    parts: ScriptParts

    def change(self, kind: str, value: Any) -> Change:
        """Return a change with words that hold for this model."""
        return change(kind, value, has_batch_norm=self.has_batch_norm, batch_size=self.parts.batch_size)


def inspect_model(origin: Origin, batch_size: int, jit_compile: bool | str, mode: str = "train") -> Facts:
    """Open a model without weights and return what advice depends on.

    Raises:
        KerasmemError: it cannot be opened or compiled.
    """
    keras = import_keras()
    with _random_state_kept(), weightless():
        with origin.opened() as opened:
            training = opened.training
        model = build(origin, [])
        layers = list(model._flatten_layers())
        structure, inputs = model_inputs(model, normalise_input_shapes(origin.input_shape))
        start = head_start(model) if list(getattr(model, "layers", ())) else 0
        backbone = [inner for layer in list(model.layers)[:start] for inner in layer._flatten_layers()]
        is_graph = is_rebuilt(model)
        smaller, why = _smaller_model(model, inputs)
        return Facts(
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
            parts=_parts(origin, model, training, structure, inputs, batch_size, jit_compile, start, smaller, mode),
        )


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave the user's random numbers as they are: Keras draws seeds from Python's."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _smaller_model(model: Any, inputs: list[Any]) -> tuple[list[list[int]], str]:
    """Return the shapes of smaller inputs that the model can be built for, or why there are none."""
    found = smaller_shapes([each.shape[1:] for each in inputs])
    if found == [list(each.shape[1:]) for each in inputs]:
        return [], "its inputs have no side or length that could be smaller"
    try:
        transformed(model, change("input_size", found))
    except KerasmemError as error:
        return [], str(error)
    return found, ""


def smaller_shapes(shapes: Sequence[Sequence[int]]) -> list[list[int]]:
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


def _parts(
    origin: Origin, model: Any, training: Any, structure: Any, inputs: list[Any], batch_size: int,
    jit_compile: bool | str, start: int, smaller: list[list[int]], mode: str,
) -> ScriptParts:  # fmt: skip
    keras = import_keras()
    samples = str(2 * batch_size)
    settings = _replaced(training, origin)

    now_shapes = [list(each.shape[1:]) for each in inputs]

    def sized(sizes: list[list[int]] | None, is_single: bool = False) -> list[Any]:
        return [
            keras.KerasTensor((batch_size, *shape), "float32" if is_single and each.dtype == "float64" else each.dtype)
            for each, shape in zip(inputs, sizes or now_shapes, strict=True)
        ]

    def targets(built: Any, sizes: list[list[int]] | None) -> str | None:
        if model.loss is None and has_own_step(model):
            return None
        labels = target_spec(model.loss, output_spec(built, structure, sized(sizes)), batch_size)
        return arrays_text(labels, keras.tree.flatten(labels), samples)

    now = targets(model, None)
    then = targets(transformed(model, change("input_size", smaller)), smaller) if smaller else now

    def input_layers(sizes: list[list[int]] | None) -> str:
        texts = []
        for each, shape in zip(model.inputs, sizes or now_shapes, strict=True):
            dtype = "float32" if sizes is None and each.dtype == "float64" else each.dtype
            name = input_name(each)
            named = (
                "" if name.startswith("input_layer") else f", name={name!r}"
            )  # a name that Keras gave it says nothing
            texts.append(f"keras.Input({tuple(shape)!r}, dtype={str(dtype)!r}{named})")
        struct = getattr(model, "_inputs_struct", None)
        return texts[0] if len(texts) == 1 and not isinstance(struct, (list, dict)) else _structured(struct, texts)

    return ScriptParts(
        opening=lambda policy: opening_lines(origin.source, origin.options, policy),
        optimizer=lambda replacement: optimizer_text(settings, replacement),
        loss=loss_text(model.loss),
        metrics=metrics_text(model),
        inputs=lambda sizes, is_single: arrays_text(structure, sized(sizes, is_single), samples),
        targets=lambda sizes: now if sizes is None else then,
        input_layers=input_layers,
        head_start=start,
        batch_size=batch_size,
        jit_compile=jit_compile,
        mode=mode,
    )


def _replaced(training: Any, origin: Origin) -> Any:
    from kerasmem.models.training import with_replaced

    return with_replaced(training, origin.optimizer, origin.loss)


def _structured(struct: Any, texts: list[str]) -> str:
    packed = import_keras().tree.pack_sequence_as(struct, texts)
    if isinstance(packed, dict):
        return "{" + ", ".join(f"{name!r}: {each}" for name, each in packed.items()) + "}"
    return "[" + ", ".join(map(str, packed)) + "]" if isinstance(packed, (list, tuple)) else str(packed)
