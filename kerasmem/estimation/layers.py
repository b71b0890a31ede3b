"""Shape inference: outputs and weights of every layer.

The model is called once on symbolic tensors of the real batch size, and every call of a layer inside is recorded. So
nested, shared, subclassed and multi-input models need no special rules, and dtypes follow Keras's policies.
Nothing is computed and no weight is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

from kerasmem.compat.keras_layers import calls_replaced, flatten_layers, functional_class, without_name_scopes
from kerasmem.errors import KerasmemError, ModelError
from kerasmem.estimation.report import LayerMemory
from kerasmem.files import package_data
from kerasmem.models.backend import import_keras, keras_reason, runs_on_jax
from kerasmem.models.inputs import ModelInput
from kerasmem.models.op_names import is_container
from kerasmem.models.sizes import element_bytes, variable_bytes
from kerasmem.models.step import infer_by_call
from kerasmem.models.user_code import is_of_a_library

_OF_LAYERS = package_data("kerasmem.estimation", "layers")
# The source of the formula counts the second as views.
VIEWS = {*_OF_LAYERS["the same buffer under another shape"], *_OF_LAYERS["the identity outside training"]}
_LARGE_INSIDE = frozenset(_OF_LAYERS["much more inside than they put out"])


class Inferred(NamedTuple):
    """Result of a call on symbolic tensors.

    Attributes:
        layers: one row for each input and layer.
        owners: name of the row that counts a weight, by the weight's id.
        opaque: names of the called layers with inner values that no row counts.
    """

    layers: tuple[LayerMemory, ...]
    owners: dict[int, str]
    opaque: tuple[str, ...] = ()


@dataclass
class _Record:
    """The calls of one layer."""

    layer: Any
    path: str
    outputs: list[tuple[tuple[int | None, ...], str]] = field(default_factory=list)
    inputs: dict[str, None] = field(default_factory=dict)  # names, in order
    uses: int = 0

    def add(self, outputs: list[Any]) -> None:
        self.uses += 1
        for tensor in outputs:
            dtype = import_keras().backend.standardize_dtype(tensor.dtype)
            has_rank = getattr(tensor.shape, "rank", 0) is not None  # shapes of TensorFlow may have none
            self.outputs.append((tuple(tensor.shape) if has_rank else (None, None), dtype))


def infer_layers(
    model: Any,
    structure: Any,
    inputs: list[ModelInput],
    batch_size: int,
    source: str = "",
    run_step: Callable[[], Any] | None = None,
) -> Inferred:
    """Return a row for each input and layer, in call order.

    Args:
        model: a Keras model, with or without weights.
        structure: nesting of the inputs (from `model_inputs`).
        inputs: the inputs, with the batch as the only open dimension.
        batch_size: samples; the figures of a sample do not depend on it.
        source: file or function of the model, for messages. Defaults to none.
        run_step: traces the training step, if that calls the layers itself. Defaults to a call of the model.

    Raises:
        ModelError: If the model cannot be called on these shapes.
    """
    _check_normalizations(model)
    flat = [tensor.tensor(batch_size) for tensor in inputs]
    recorder = _Recorder(model, [tensor.name for tensor in inputs])
    try:
        with calls_replaced(recorder.call), without_name_scopes():
            infer_by_call(model, structure, flat) if run_step is None else run_step()
    except KerasmemError:
        raise
    except Exception as error:
        raise not_callable(model, inputs, source, error) from error
    counted: dict[int, str] = {}
    rows = [_input_row(tensor) for tensor in inputs]
    rows += [_layer_row(record, batch_size, counted) for record in recorder.layers.values()]
    rows += _unused_rows(model, counted)
    return Inferred(tuple(rows), counted, tuple(recorder.opaque))


def is_opaque(part: Any) -> bool:
    """Return whether code of the user, or of a class with large inner values, computes a part of the step.

    Args:
        part: a layer, operation, loss, metric or optimizer, or the name of one.
    """
    if isinstance(part, str):
        names = {re.sub(r".*>|_", "", name).lower() for name in import_keras().saving.get_custom_objects()}
        return part.replace("_", "").lower() in {*names, *map(str.lower, _LARGE_INSIDE)}
    attributes = [value for value in getattr(part, "__dict__", {}).values() if callable(value)]
    names = {getattr(value, "__name__", type(value).__name__) for value in (type(part), part, *attributes)}
    return bool(names & _LARGE_INSIDE) or not all(map(is_of_a_library, (part, *attributes)))


def not_callable(model: Any, inputs: list[ModelInput], source: str, error: Exception) -> ModelError:
    """Return the error of a model that cannot be called on its inputs."""
    shapes = ", ".join(f"{tensor.name} {tensor.shape[1:]}" for tensor in inputs)
    prefix = f"{source}: " if source else ""
    return ModelError(f"{prefix}model {model.name!r} cannot be called on {shapes}: {keras_reason(error)}")


class _Recorder:
    """Records the outputs of every called layer."""

    def __init__(self, model: Any, input_names: list[str]) -> None:
        self._model = model
        self._input_names = input_names
        self._outer: list[Any] = []  # models and layers with calls in progress
        self._is_in_leaf = False
        self.layers: dict[int, _Record] = {}
        self.opaque: dict[str, None] = {}  # names, in order
        # Tensors by id, with the name of the layer that made them; kept alive so that ids stay unique.
        self._sources: dict[int, tuple[Any, str]] = {}

    def call(self, call: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        inputs = _tensors((args, kwargs))
        # Calls on Keras's own symbolic tensors build a model, such as a Sequential that builds itself late.
        if self._is_in_leaf or any(isinstance(tensor, import_keras().KerasTensor) for tensor in inputs):
            return call(layer, *args, **kwargs)
        if layer is self._model:
            self._record_sources(zip(inputs, self._input_names, strict=False))
        self._is_in_leaf = is_leaf = not (isinstance(layer, import_keras().Layer) and is_container(layer))
        path = "/".join([*(outer.name for outer in self._outer if outer is not self._model), layer.name])
        self._outer.append(layer)
        parts = [*flatten_layers(layer)] if is_leaf and isinstance(layer, import_keras().Layer) else [layer]
        parts += [item for item in import_keras().tree.flatten((args, kwargs)) if isinstance(item, FunctionType)]
        if any(map(is_opaque, parts)):
            self.opaque[path] = None
        try:
            outputs = call(layer, *args, **kwargs)
        finally:
            self._outer.pop()
            self._is_in_leaf = False
        own = _tensors(outputs)
        if not is_leaf:
            # A container computes something itself if none of its layers made an output, or if it has own weights.
            own = [tensor for tensor in own if id(tensor) not in self._sources]
        if is_leaf or (own and not _is_graph(layer)) or _own_weights(layer):
            record = self.layers.setdefault(id(layer), _Record(layer, path))
            record.add(own)
            sources = [self._sources[id(tensor)][1] for tensor in inputs if id(tensor) in self._sources]
            record.inputs.update(dict.fromkeys(sources))
            self._record_sources((tensor, record.path) for tensor in own)
        return outputs

    def _record_sources(self, tensors: Iterable[tuple[Any, str]]) -> None:
        self._sources.update((id(tensor), (tensor, name)) for tensor, name in tensors)


def _check_normalizations(model: Any) -> None:
    """Refuse layers that TensorFlow cannot run: their constants would belong to the graph of their first call."""
    for layer in [] if runs_on_jax() else flatten_layers(model):
        if isinstance(layer, import_keras().layers.Normalization) and not layer.built:
            raise ModelError(
                f"layer {layer.name!r} (Normalization) must be built before its first step; call its adapt(data), or "
                "build(input_shape) if it has mean and variance"
            )


def _tensors(outputs: Any) -> list[Any]:
    return [item for item in import_keras().tree.flatten(outputs) if hasattr(item, "shape") and hasattr(item, "dtype")]


def _is_graph(layer: Any) -> bool:
    """Return whether a model does nothing but call its layers."""
    return isinstance(layer, (import_keras().Sequential, functional_class()))


def _own_weights(layer: Any) -> list[Any]:
    inner = {id(weight) for sublayer in flatten_layers(layer, include_self=False) for weight in sublayer.weights}
    return [weight for weight in layer.weights if id(weight) not in inner]


def _elements(model_input: ModelInput) -> int:
    """Return the elements of one sample of an input, on average if its tensors are sparse or ragged."""
    leaf = model_input.leaf
    if leaf is None or (leaf.values is None and not leaf.rows):
        return math.prod(model_input.shape[1:])  # type: ignore[arg-type]  # model_inputs left none open
    return -(-sum(math.prod(shape) for shape, _ in leaf.parts()) // max(leaf.shape[0] or 1, 1))


def _input_row(model_input: ModelInput) -> LayerMemory:
    elements = _elements(model_input)
    return LayerMemory(
        name=model_input.name,
        class_name="InputLayer",
        output_shape=(None, *model_input.shape[1:]),
        activation_elements=elements,
        activation_bytes=elements * element_bytes(model_input.dtype),
        dtype=model_input.dtype,
        kind="input",
    )


def _layer_row(record: _Record, batch_size: int, counted: dict[int, str]) -> LayerMemory:
    layer = record.layer
    weights = [weight for weight in getattr(layer, "weights", ()) if id(weight) not in counted]
    counted.update((id(weight), record.path) for weight in weights)
    # Some of TensorFlow's operations on text lose the batch. A single open dimension depends on the data.
    outputs = [
        ((batch_size, *shape[1:]) if len(shape) > 1 and shape[0] is None else shape, dtype)
        for shape, dtype in record.outputs
    ]
    is_view = type(layer).__name__ in VIEWS
    own = [] if is_view else outputs
    elements = octets = None
    if not any(None in shape for shape, _ in own):
        counts = [(math.prod(shape), element_bytes(dtype)) for shape, dtype in own]  # type: ignore[arg-type]
        # An output that does not grow with the batch is divided by the samples, rounded up.
        elements = -(-sum(count for count, _ in counts) // batch_size)
        octets = -(-sum(count * size for count, size in counts) // batch_size)
    trained = {id(weight) for weight in getattr(layer, "trainable_weights", ())}
    return LayerMemory(
        name=record.path,
        class_name=type(layer).__name__,
        output_shape=_batchless(outputs[0][0], batch_size) if outputs else None,
        parameters=sum(math.prod(weight.shape) for weight in weights),
        trainable_parameters=sum(math.prod(weight.shape) for weight in weights if id(weight) in trained),
        activation_elements=elements,
        activation_bytes=octets,
        weight_bytes=sum(variable_bytes(weight) for weight in weights),
        dtype=outputs[0][1] if outputs else None,
        uses=record.uses,
        kind="view" if is_view else "layer",
        inputs=tuple(record.inputs),
    )


def _batchless(shape: tuple[int | None, ...], batch_size: int) -> tuple[int | None, ...]:
    return (None, *shape[1:]) if shape and shape[0] == batch_size else shape


def _unused_rows(model: Any, counted: dict[int, str]) -> list[LayerMemory]:
    """Return rows for layers that the call did not use."""
    rows = []
    for layer in (*flatten_layers(model, include_self=False), model):
        uncounted = [weight for weight in layer.weights if id(weight) not in counted]
        if uncounted and not (isinstance(layer, import_keras().Model) and layer is not model):
            rows.append(_layer_row(_Record(layer, layer.name), 1, counted))
    return rows
