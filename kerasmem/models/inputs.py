"""Shapes of a model's inputs, and the user's settings of inputs and targets."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kerasmem.compat.keras_layers import functional_class
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras
from kerasmem.models.data import Batch, Leaf
from kerasmem.models.own_step import has_own_step, step_arguments

Shape = tuple[int | None, ...]
NO_TARGETS = "none"
_INPUT_SHAPE = "--input-shape"
_SCALAR, _NUMBER = "scalar", "number"
_EXAMPLES = ("224,224,3", "10", "16:int32")


@dataclass(frozen=True)
class ModelInput:
    """One input of a model.

    Attributes:
        name: the input's name.
        shape: shape with the batch first; unknown dimensions are None.
        dtype: dtype to which Keras casts the input, or that of the user's data.
        leaf: the tensor of the user's data, or None.
    """

    name: str
    shape: Shape
    dtype: str
    leaf: Leaf | None = None

    def tensor(self, batch_size: int) -> Any:
        """Return the Keras tensor of a batch."""
        if self.leaf is not None:
            return self.leaf.resized(batch_size).tensor()
        return import_keras().KerasTensor((batch_size, *self.shape[1:]), self.dtype)


@dataclass(frozen=True)
class WithNumbers:
    """Structure of a step function's inputs with scalar arguments.

    Attributes:
        structure: structure of the other inputs.
        numbers: scalar arguments by name; Python numbers or Keras tensors.
    """

    structure: Any
    numbers: Mapping[str, Any]


class ByKeyword(tuple[str, ...]):
    """Structure of inputs that are separate arguments of a model's `call`, in order."""


@dataclass(frozen=True)
class ShapeSetting:
    """The user's setting of an input or target.

    Attributes:
        sizes: shape without the batch.
        dtype: dtype, if the user sets it.
        number: Python number instead of a tensor, for an argument of a step function.
        is_scalar: whether the argument of a step function is a tensor without dimensions.
    """

    sizes: tuple[int, ...]
    dtype: str | None = None
    number: float | None = None
    is_scalar: bool = False

    def __str__(self) -> str:
        return ",".join(map(str, self.sizes))


def normalise_input_shapes(shapes: Any, option: str = _INPUT_SHAPE) -> dict[str, ShapeSetting]:
    """Read the user's shapes without the batch: None, a shape, a text, a list of texts or a dict of shapes by name.

    A text is "image=224,224,3", or "224,224,3" for a model with one input. A dtype may follow, for models that do not
    declare their inputs: "ids=128:int32".

    Args:
        shapes: the shapes.
        option: the option's name in messages. Defaults to --input-shape.

    Returns:
        Shapes by name; a shape without a name has the name "".

    Raises:
        UsageError: If a shape cannot be read.
    """
    if shapes is None:
        return {}
    texts = [shapes] if isinstance(shapes, str) else shapes
    if isinstance(shapes, Mapping):
        named = {str(name): shape for name, shape in shapes.items()}
    elif isinstance(texts, (list, tuple)) and texts and all(isinstance(text, str) for text in texts):
        named = {name.strip(): shape for name, _, shape in (text.rpartition("=") for text in texts)}
    else:
        named = {"": shapes}
    return {
        name: _read_shape(shape, f"{option} {name}" if name else option, bool(name) and option == _INPUT_SHAPE)
        for name, shape in named.items()
    }


def _read_shape(value: Any, name: str, may_be_number: bool = False) -> ShapeSetting:
    text, dtype = value, ""
    if isinstance(value, str):
        dimensions, _, dtype = (part.strip() for part in value.partition(":"))
        if may_be_number and dimensions == _SCALAR:
            return ShapeSetting((), check_dtype(dtype or "float32", name), is_scalar=True)
        if may_be_number and dimensions == _NUMBER:
            with contextlib.suppress(ValueError):
                value = json.loads(dtype)
        else:
            dimensions = dimensions.strip("()[] ,").replace("x", ",")
            value = dimensions.split(",") if dimensions else []
    if may_be_number and isinstance(value, (bool, int, float)):
        return ShapeSetting((), number=value)
    try:
        sizes = tuple(int(size) for size in value)
    except (TypeError, ValueError):
        sizes = (0,)
    if any(size < 1 for size in sizes):
        number = ", or a number such as number:3" if may_be_number else ""
        raise UsageError(
            f"{name} must be sizes of at least 1 without the batch, such as 224,224,3 or 9:int32{number}; got {text!r}"
        )
    return ShapeSetting(sizes, check_dtype(dtype, name) if dtype else None)


def check_dtype(dtype: str, name: str) -> str:
    """Return the standard name of a dtype.

    Args:
        dtype: the user's name of the dtype.
        name: the setting's name in messages.

    Raises:
        UsageError: If Keras does not know the dtype.
    """
    try:
        return str(import_keras().backend.standardize_dtype(dtype))
    except (ValueError, TypeError):
        raise UsageError(f"{name} must have a dtype such as int32 or float32; got {dtype!r}") from None


@dataclass(frozen=True)
class TargetSettings:
    """The user's settings of the targets.

    Attributes:
        shapes: shapes without the batch by name of the target, "" for a single one. If empty, the loss decides.
        dtype: default for shapes without a dtype. If None, the loss decides.
        are_none: whether the step takes no targets.
        sample_weight: shape of the sample weights, () for one a sample, or None without sample weights.
    """

    shapes: Mapping[str, ShapeSetting] = field(default_factory=dict)
    dtype: str | None = None
    are_none: bool = False
    sample_weight: tuple[int, ...] | None = None


def read_targets(
    target_shape: Any = None, target_dtype: str | None = None, sample_weight: Any = False
) -> TargetSettings:
    """Read `target_shape` and `target_dtype`.

    Args:
        target_shape: None, a shape, a text, a list of texts or a dict of shapes by name, without the batch. "none" if
            the step takes no targets.
        target_dtype: dtype, such as "int32".
        sample_weight: True for one weight a sample, as `class_weight` makes them, or their shape without the batch.

    Raises:
        UsageError: If a setting cannot be read, or they contradict each other.
    """
    dtype = None if target_dtype is None else check_dtype(target_dtype, "--target-dtype")
    weights: tuple[int, ...] | None = None
    if sample_weight is True:
        weights = ()
    elif sample_weight not in (False, None):
        weights = _read_shape(sample_weight, "--sample-weight").sizes
    if target_shape in (NO_TARGETS, [NO_TARGETS], (NO_TARGETS,)):
        if dtype is not None:
            raise UsageError(f"--target-shape {NO_TARGETS} and --target-dtype cannot be combined; choose one")
        return TargetSettings(are_none=True, sample_weight=weights)
    return TargetSettings(normalise_input_shapes(target_shape, "--target-shape"), dtype, sample_weight=weights)


def by_place(names: Collection[str]) -> bool:
    """Return whether names are the indices of a tuple: "0", "1", …."""
    return [*names] == [str(index) for index in range(len(names))]


def model_inputs(model: Any, settings: Mapping[str, ShapeSetting]) -> tuple[Any, list[ModelInput]]:
    """Return the structure of the model's inputs (a list, a dict, one) and the flat inputs, with the user's shapes.

    Args:
        model: a Keras model, built or not.
        settings: the user's shapes by name; "" for a single input.

    Raises:
        UsageError: If a name or a shape contradicts the model, or a dimension is unknown.
    """
    numbers = {name: shape for name, shape in settings.items() if shape.number is not None or shape.is_scalar}
    if numbers:
        others = {name: shape for name, shape in settings.items() if name not in numbers}
        structure, flat = model_inputs(model, others)
        return WithNumbers(structure, {name: _number(model, name, shape) for name, shape in numbers.items()}), flat
    declared = _declared_inputs(model)
    for tensor in [] if declared is None else model.inputs:
        if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
            kind = "sparse" if tensor.sparse else "ragged"
            raise UsageError(
                f"input {input_name(tensor)!r} is {kind}, so its memory depends on its values; pass the data of fit: "
                "data=… (--data file.py:function)"
            )
    try:
        structure, flat = _undeclared_inputs(model, settings) if declared is None else _settle_all(*declared, settings)
    except UsageError:
        if declared is None or not (settings and has_own_step(model)):
            raise
        structure, flat = _undeclared_inputs(model, settings)  # its step may compute these inputs from others
    if unknown := [model_input for model_input in flat if None in model_input.shape[1:]]:
        inputs = ", ".join(f"{item.name!r} {_format(item.shape)}" for item in unknown)
        options = " ".join(f"--input-shape {item.name}={_example(item.shape[1:])}" for item in unknown)
        raise UsageError(
            f"inputs with unknown dimensions: {inputs}; pass the data of fit (--data, data=…), or the sizes "
            f"without the batch, for example {options}"
        )
    return structure, flat


def data_inputs(model: Any, batch: Batch) -> tuple[Any, list[ModelInput]]:
    """Return the structure of the inputs in the user's data and the flat inputs."""
    tree = import_keras().tree
    x, _, _ = batch.parts()
    leaves = [leaf for leaf in tree.flatten(x) if leaf is not None]
    declared = None if isinstance(x, Mapping) else _declared_inputs(model)
    names = [tensor.name for tensor in declared[1]] if declared is not None else []
    if len(names) != len(leaves):
        names = ["/".join(map(str, path)) or "input" for path, leaf in tree.flatten_with_path(x) if leaf is not None]
    flat = [
        ModelInput(name, (None, *leaf.shape[1:]), leaf.dtype, leaf) for name, leaf in zip(names, leaves, strict=True)
    ]
    return x if tree.is_nested(x) else None, flat


def _number(model: Any, name: str, shape: ShapeSetting) -> Any:
    """Return a scalar argument of a step function."""
    parameters = () if step_arguments(model) is None else inspect.signature(model.loop_step).parameters
    if name not in parameters:
        arguments = ", ".join(parameters) or "the model has none"
        raise UsageError(f"--input-shape {name} may be a number only for an argument of a step function ({arguments})")
    return import_keras().KerasTensor((), shape.dtype) if shape.number is None else shape.number


def _declared_inputs(model: Any) -> tuple[Any, list[ModelInput]] | None:
    """Return the structure of a functional or sequential model's inputs and the flat inputs, or None."""
    try:
        tensors = list(model.inputs or [])
    except (AttributeError, ValueError):
        return None
    if not tensors:
        return None
    flat = [ModelInput(input_name(tensor), tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    is_nested = isinstance(model, functional_class()) or len(tensors) > 1
    return (model.input if is_nested else tensors[0]), flat


def input_name(tensor: Any) -> str:
    """Return the name of a tensor's input layer."""
    history = getattr(tensor, "_keras_history", None)
    return str(history.operation.name if history else tensor.name)


def _undeclared_inputs(model: Any, settings: Mapping[str, ShapeSetting]) -> tuple[Any, list[ModelInput]]:
    """Return the inputs of a subclassed model by the user's shapes, or else by the shapes that it was built with."""
    if settings:
        flat = [
            ModelInput(name or "input", (None, *shape.sizes), shape.dtype or "float32")
            for name, shape in settings.items()
        ]
        return (None, flat) if list(settings) == [""] else _match_names(model, flat)
    config: Any = (model.get_build_config() or {}) if model.built else {}
    shapes = config.get("shapes_dict")  # "a_shape", "b_shape", … for a `call` with several arguments
    named = {str(key).removesuffix("_shape"): shape for key, shape in (shapes or {}).items()}
    built: Any = named if len(named) > 1 else config.get("input_shape")
    if _is_shape(built):
        return None, [ModelInput("input", (None, *built[1:]), "float32")]
    if isinstance(built, dict) and all(_is_shape(shape) for shape in built.values()):
        return _match_names(model, [ModelInput(name, (None, *shape[1:]), "float32") for name, shape in built.items()])
    if isinstance(built, (list, tuple)) and built and all(_is_shape(shape) for shape in built):
        flat = [ModelInput(f"input_{i}", (None, *shape[1:]), "float32") for i, shape in enumerate(built)]
        return [None] * len(flat), flat
    arguments = step_arguments(model) or ()
    example = " ".join(f"--input-shape {name}={shape}" for name, shape in zip(arguments, _EXAMPLES, strict=False))
    raise UsageError(
        f"model {model.name!r} does not declare the shape of {', '.join(arguments) or 'its input'}; pass the data of "
        f"fit (--data, data=…), or its shape without the batch, for example {example or '--input-shape 224,224,3'}"
    )


def _match_names(model: Any, flat: list[ModelInput]) -> tuple[Any, list[ModelInput]]:
    """Return the structure of named inputs, and the inputs in its order.

    If `call` or the step function has all these arguments, the inputs are arguments. Otherwise, they are one dict that
    Keras flattens by name.
    """
    names = [model_input.name for model_input in flat]
    if by_place(names):
        return (None,) * len(flat), flat
    of_step = step_arguments(model)
    arguments = list(inspect.signature(model.call).parameters) if of_step is None else of_step
    if (len(names) > 1 or of_step) and all(name in arguments for name in names):
        return ByKeyword(names), flat
    return dict.fromkeys(sorted(names)), sorted(flat, key=lambda model_input: model_input.name)


def _is_shape(value: Any) -> bool:
    sizes = value if isinstance(value, (list, tuple)) else ()
    return bool(sizes) and all(size is None or isinstance(size, int) for size in sizes)


def _settle_all(
    structure: Any, declared: list[ModelInput], settings: Mapping[str, ShapeSetting]
) -> tuple[Any, list[ModelInput]]:
    """Return the inputs that a model declares, with the user's shapes."""
    flat = [_settle(model_input, settings, is_single=len(declared) == 1) for model_input in declared]
    unknown = set(settings) - {model_input.name for model_input in flat} - ({""} if len(flat) == 1 else set())
    if unknown:
        name = next(iter(sorted(unknown))) or "a shape without a name"
        inputs = ", ".join(f"{model_input.name!r} {_format(model_input.shape)}" for model_input in flat)
        raise UsageError(f"--input-shape must name an input of the model: {inputs}; got {name!r}")
    return structure, flat


def _settle(declared: ModelInput, settings: Mapping[str, ShapeSetting], is_single: bool) -> ModelInput:
    shape = settings.get(declared.name, settings.get("") if is_single else None)
    if shape is None:
        return declared
    if shape.dtype not in (None, declared.dtype):
        raise UsageError(f"--input-shape {declared.name} must have the dtype {declared.dtype}; got {shape.dtype}")
    own = declared.shape[1:]
    settled = tuple(size if mine is None else mine for mine, size in zip(own, shape.sizes, strict=False))
    if len(own) != len(shape.sizes) or settled != shape.sizes:
        raise UsageError(
            f"--input-shape {declared.name} must have {len(own)} sizes without the batch, such as {_example(own)}, to "
            f"match {_format(declared.shape)}; got {shape}"
        )
    return ModelInput(declared.name, (declared.shape[0], *settled), declared.dtype)


def _example(sizes: Shape) -> str:
    """Return sizes such as an image's (224 × 224), or a sequence's (128)."""
    usual = 224 if len(sizes) > 2 else 128
    return ",".join(str(size or usual) for size in sizes)


def _format(shape: Shape) -> str:
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
