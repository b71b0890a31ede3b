"""One batch of a model, in shapes: inputs, outputs and targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasmem.compat.keras_functional import functional_class, graph_of
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras, symbolic_outputs
from kerasmem.models.compiling import sparse_losses
from kerasmem.models.inputs import ByKeyword, GivenTargets, WithNumbers, by_place
from kerasmem.models.own_step import has_call, has_own_step
from kerasmem.models.weightless import placeholders_for


def pack_inputs(structure: Any, flat: list[Any]) -> Any:
    """Pack flat inputs into the model's structure (from `model_inputs`)."""
    if isinstance(structure, WithNumbers):
        return (pack_inputs(structure.structure, flat), dict(structure.numbers))
    if isinstance(structure, ByKeyword):
        return dict(zip(structure, flat, strict=True))
    nested = isinstance(structure, (list, tuple, dict))
    return import_keras().tree.pack_sequence_as(structure, flat) if nested else flat[0]


def output_spec(model: Any, structure: Any, flat: list[Any]) -> Any:
    """Infer the model's outputs for inputs of these shapes (Keras tensors)."""
    known = _declared_outputs(model, flat)
    return called_on(model, structure, flat) if known is None else known


def called_on(model: Any, structure: Any, flat: list[Any]) -> Any:
    """Infer the model's outputs by a call on shapes, which calls every layer inside."""

    def call(*tensors: Any) -> Any:
        packed = pack_inputs(structure, list(tensors))
        with placeholders_for(model.variables):
            return model(**packed) if isinstance(structure, ByKeyword) else model(packed)

    return symbolic_outputs(call, *flat)


def _declared_outputs(model: Any, flat: list[Any]) -> Any:
    """Return a functional model's declared outputs for these inputs, or None if a call is needed."""
    keras = import_keras()
    graph = graph_of(model)
    if type(model).call not in (keras.Sequential.call, functional_class().call) or graph is None:
        return None
    struct, declared = graph.output, graph.inputs
    if len(declared) != len(flat):
        return None
    batch = flat[0].shape[0]
    if any(tuple(one.shape[1:]) != tuple(other.shape[1:]) for one, other in zip(declared, flat, strict=True)):
        return None
    if any(None in tensor.shape[1:] or tensor.shape[:1] != (None,) for tensor in keras.tree.flatten(struct)):
        return None
    return keras.tree.map_structure(lambda each: keras.KerasTensor((batch, *each.shape[1:]), each.dtype), struct)


def step_targets(model: Any, given: GivenTargets, outputs: Callable[[], Any], batch_size: int) -> Any:
    """Return the targets of a compiled model's step as Keras tensors, or None.

    Args:
        model: compiled.
        given: the user's settings of them.
        outputs: returns the model's outputs; only called if the loss decides.
        batch_size: samples.

    Raises:
        UsageError: If a dtype is given for targets whose shape is not known.
    """
    keras = import_keras()
    if given.are_none:
        return None
    if given.shapes:
        usual = "int32" if any(sparse_losses(model.loss, None)) else "float32"
        made = {
            name: keras.KerasTensor((batch_size, *shape.sizes), shape.dtype or given.dtype or usual)
            for name, shape in given.shapes.items()
        }
        return made[""] if list(made) == [""] else tuple(made.values()) if by_place(made) else made
    if has_own_step(model) and (model.loss is None or not has_call(model)):
        if given.dtype is not None:
            raise UsageError("--target-dtype: what shape the targets have is not known; give --target-shape, too")
        return None
    try:
        found = outputs()
    except Exception:
        if has_own_step(model):  # its `call` does not take what its `train_step` does
            return None
        raise
    labels = target_spec(model.loss, found, batch_size)
    if given.dtype is None:
        return labels
    return keras.tree.map_structure(lambda each: keras.KerasTensor(each.shape, given.dtype), labels)


def target_spec(loss: Any, outputs: Any, batch_size: int) -> Any:
    """Return the labels (Keras tensors): class numbers for sparse losses, else one value for each output."""
    keras = import_keras()
    flat = keras.tree.flatten(outputs)
    labels = []
    for tensor, is_sparse in zip(flat, sparse_losses(loss, outputs), strict=True):
        shape = tuple(batch_size if number == 0 and size is None else size for number, size in enumerate(tensor.shape))
        is_float = tensor.dtype.startswith(("float", "bfloat"))
        dtype = "int32" if is_sparse else "float32" if is_float else tensor.dtype
        labels.append(keras.KerasTensor(shape[:-1] if is_sparse else shape, dtype))
    return keras.tree.pack_sequence_as(outputs, labels)
