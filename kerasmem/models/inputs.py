"""The shapes of a batch at the model's inputs, and the user's settings of its targets."""

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
        shape: with the batch first; None if a dimension is open.
        dtype: the dtype that Keras casts the input to.
    """

    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class WithNumbers:
    """The structure of a step function's inputs, with arguments that do not grow with the batch.

    Attributes:
        structure: of the other inputs.
        numbers: by name; Python numbers, and Keras tensors without dimensions.
    """

    structure: Any
    numbers: Mapping[str, Any]


class ByKeyword(tuple[str, ...]):
    """The structure of inputs that a model's `call` takes as arguments of their own, in order."""


@dataclass(frozen=True)
class GivenShape:
    """The user's setting of an input.

    Attributes:
        sizes: without the batch.
        dtype: if it is set.
        number: a Python number instead of a tensor, for an argument of a step function.
        is_scalar: a tensor without dimensions, likewise.
    """

    sizes: tuple[int, ...]
    dtype: str | None = None
    number: float | None = None
    is_scalar: bool = False

    def __str__(self) -> str:
        return ",".join(map(str, self.sizes))


def normalise_input_shapes(given: Any, option: str = _INPUT_SHAPE) -> dict[str, GivenShape]:
    """Read shapes without the batch: None, a shape, a text, a list of texts or a dict from name to shape.

    A text is "image=224,224,3", or "224,224,3" for a model with one input. A dtype may follow, for models that do not
    declare their inputs: "ids=128:int32".

    Args:
        given: the shapes.
        option: the option that gives them, for messages.

    Returns:
        Name to shape; a shape without a name has the name "".

    Raises:
        UsageError: If `given` is none of these.
    """
    if given is None:
        return {}
    texts = [given] if isinstance(given, str) else given
    if isinstance(given, Mapping):
        named = {str(name): shape for name, shape in given.items()}
    elif isinstance(texts, (list, tuple)) and texts and all(isinstance(text, str) for text in texts):
        named = {name.strip(): shape for name, _, shape in (text.rpartition("=") for text in texts)}
    else:
        named = {"": given}
    return {
        name: _shape(shape, f"{option} {name}=" if name else f"{option} ", bool(name) and option == _INPUT_SHAPE)
        for name, shape in named.items()
    }


def _shape(value: Any, where: str, may_be_number: bool = False) -> GivenShape:
    shown, dtype = value, ""
    if isinstance(value, str):
        dimensions, _, dtype = (part.strip() for part in value.partition(":"))
        if may_be_number and dimensions == _SCALAR:
            return GivenShape((), check_dtype(dtype or "float32", f"{where}{shown!r}"), is_scalar=True)
        if may_be_number and dimensions == _NUMBER:
            with contextlib.suppress(ValueError):
                value = json.loads(dtype)
        else:
            dimensions = dimensions.strip("()[] ,").replace("x", ",")
            value = dimensions.split(",") if dimensions else []
    if may_be_number and isinstance(value, (bool, int, float)):
        return GivenShape((), number=value)
    try:
        sizes = tuple(int(size) for size in value)
    except (TypeError, ValueError):
        sizes = (0,)
    if any(size < 1 for size in sizes):
        number = " (a number: number:3)" if may_be_number else ""
        raise UsageError(
            f"{where}{shown!r}: write sizes of at least 1, without the batch, such as 224,224,3 or 9:int32{number}"
        )
    return GivenShape(sizes, check_dtype(dtype, f"{where}{shown!r}") if dtype else None)


def check_dtype(dtype: str, where: str) -> str:
    """Return the standard name of a dtype.

    Args:
        dtype: as the user writes it.
        where: for the message.

    Raises:
        UsageError: If Keras has no such dtype.
    """
    try:
        return str(import_keras().backend.standardize_dtype(dtype))
    except (ValueError, TypeError):
        raise UsageError(f"{where}: {dtype!r} is not a dtype such as int32 or float32") from None


@dataclass(frozen=True)
class GivenTargets:
    """The user's settings of the targets.

    Attributes:
        shapes: name of the target ("" for the only one) → its shape without the batch; empty: as the loss takes them.
        dtype: of those that do not say it themselves; None: as the loss takes them.
        are_none: the step takes no targets.
    """

    shapes: Mapping[str, GivenShape] = field(default_factory=dict)
    dtype: str | None = None
    are_none: bool = False


def given_targets(target_shape: Any = None, target_dtype: str | None = None) -> GivenTargets:
    """Read `target_shape` and `target_dtype`.

    Args:
        target_shape: None, a shape, a text, a list of texts or a dict from name to shape, without the batch; "none"
            where the step takes no targets.
        target_dtype: such as "int32".

    Raises:
        UsageError: If they do not say that.
    """
    dtype = None if target_dtype is None else check_dtype(target_dtype, "--target-dtype")
    if target_shape in (NO_TARGETS, [NO_TARGETS], (NO_TARGETS,)):
        if dtype is not None:
            raise UsageError(f"--target-shape {NO_TARGETS} and --target-dtype: choose one")
        return GivenTargets(are_none=True)
    return GivenTargets(normalise_input_shapes(target_shape, "--target-shape"), dtype)


def by_place(names: Collection[str]) -> bool:
    """Return whether names are the places in a tuple, "0" first."""
    return [*names] == [str(place) for place in range(len(names))]


def model_inputs(model: Any, given: Mapping[str, GivenShape]) -> tuple[Any, list[ModelInput]]:
    """Return the model's inputs as it structures them (a list, a dict, one) and flat, with the given shapes put in.

    Args:
        model: a Keras model, built or not.
        given: name to shape; "" for the only input.

    Raises:
        UsageError: If a name is not an input's, a shape contradicts the model, or a dimension stays open.
    """
    numbers = {name: shape for name, shape in given.items() if shape.number is not None or shape.is_scalar}
    if numbers:
        others = {name: shape for name, shape in given.items() if name not in numbers}
        structure, flat = model_inputs(model, others)
        return WithNumbers(structure, {name: _number(model, name, shape) for name, shape in numbers.items()}), flat
    declared = _declared_inputs(model)
    try:
        structure, flat = _undeclared_inputs(model, given) if declared is None else _settled(*declared, given)
    except UsageError:
        if declared is None or not (given and has_own_step(model)):
            raise
        structure, flat = _undeclared_inputs(model, given)  # its step may take other inputs, and make these of them
    for each in flat:
        if None in each.shape[1:]:
            raise UsageError(
                f"input {each.name!r} has open dimensions {_show(each.shape)}: give them without the batch, "
                f"for example --input-shape {each.name}={_example(each.shape[1:])}"
            )
    return structure, flat


def _number(model: Any, name: str, shape: GivenShape) -> Any:
    """Return an argument of a step function that does not grow with the batch."""
    taken = () if step_arguments(model) is None else inspect.signature(model.loop_step).parameters
    if name not in taken:
        raise UsageError(
            f"--input-shape {name}: only an argument of a step function may be a number "
            f"({', '.join(taken) or 'the model has none'})"
        )
    return import_keras().KerasTensor((), shape.dtype) if shape.number is None else shape.number


def _declared_inputs(model: Any) -> tuple[Any, list[ModelInput]] | None:
    """Return the structure of a functional or sequential model's inputs, and the inputs flat."""
    try:
        tensors = list(model.inputs or [])
    except (AttributeError, ValueError):
        return None
    if not tensors:
        return None
    flat = [ModelInput(input_name(each), tuple(each.shape), str(each.dtype)) for each in tensors]
    is_nested = isinstance(model, functional_class()) or len(tensors) > 1
    return (model.input if is_nested else tensors[0]), flat


def input_name(tensor: Any) -> str:
    """Return the name of the input layer."""
    history = getattr(tensor, "_keras_history", None)
    return str(history.operation.name if history else tensor.name)


def _undeclared_inputs(model: Any, given: Mapping[str, GivenShape]) -> tuple[Any, list[ModelInput]]:
    """Return the inputs of a subclassed model, from the shapes given or those that it was built with."""
    if given:
        flat = [
            ModelInput(name or "input", (None, *each.sizes), each.dtype or "float32") for name, each in given.items()
        ]
        return (None, flat) if list(given) == [""] else _named(model, flat)
    config: Any = (model.get_build_config() or {}) if model.built else {}
    shapes = config.get("shapes_dict")  # of a `call` with several arguments: "a_shape", "b_shape", …
    named = {str(key).removesuffix("_shape"): shape for key, shape in (shapes or {}).items()}
    built: Any = named if len(named) > 1 else config.get("input_shape")
    if _is_shape(built):
        return None, [ModelInput("input", (None, *built[1:]), "float32")]
    if isinstance(built, dict) and all(_is_shape(shape) for shape in built.values()):
        return _named(model, [ModelInput(name, (None, *shape[1:]), "float32") for name, shape in built.items()])
    if isinstance(built, (list, tuple)) and built and all(_is_shape(shape) for shape in built):
        flat = [ModelInput(f"input_{i}", (None, *shape[1:]), "float32") for i, shape in enumerate(built)]
        return [None] * len(flat), flat
    taken = step_arguments(model) or ()
    shown = " ".join(f"--input-shape {name}={shape}" for name, shape in zip(taken, _EXAMPLES, strict=False))
    raise UsageError(
        f"model {model.name!r} does not say what shapes it takes for {', '.join(taken) or 'its input'}: give them "
        f"without the batch, for example {shown or '--input-shape 224,224,3'}"
    )


def _named(model: Any, flat: list[ModelInput]) -> tuple[Any, list[ModelInput]]:
    """Return the structure of named inputs, and the inputs in its order.

    They are arguments of `call`, or of a step function, if it has all those names, else one dict, which Keras
    flattens by name.
    """
    names = [each.name for each in flat]
    if by_place(names):
        return (None,) * len(flat), flat
    taken = step_arguments(model)
    arguments = list(inspect.signature(model.call).parameters) if taken is None else taken
    if (len(names) > 1 or taken) and all(name in arguments for name in names):
        return ByKeyword(names), flat
    return dict.fromkeys(sorted(names)), sorted(flat, key=lambda each: each.name)


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(size is None or isinstance(size, int) for size in value)
    )


def _settled(
    structure: Any, declared: list[ModelInput], given: Mapping[str, GivenShape]
) -> tuple[Any, list[ModelInput]]:
    """Return the inputs that a model declares, with the given shapes put in."""
    flat = [_settle(each, given, alone=len(declared) == 1) for each in declared]
    unknown = set(given) - {each.name for each in flat} - ({""} if len(flat) == 1 else set())
    if unknown:
        wrong = next(iter(sorted(unknown))) or "a shape without a name"
        shown = ", ".join(f"{each.name!r} {_show(each.shape)}" for each in flat)
        raise UsageError(f"--input-shape: {wrong!r} is no input of the model; it has {shown}")
    return structure, flat


def _settle(declared: ModelInput, given: Mapping[str, GivenShape], alone: bool) -> ModelInput:
    shape = given.get(declared.name, given.get("") if alone else None)
    if shape is None:
        return declared
    if shape.dtype not in (None, declared.dtype):
        raise UsageError(f"--input-shape {declared.name}: the model takes {declared.dtype} there, not {shape.dtype}")
    own = declared.shape[1:]
    settled = tuple(size if mine is None else mine for mine, size in zip(own, shape.sizes, strict=False))
    if len(own) != len(shape.sizes) or settled != shape.sizes:
        raise UsageError(
            f"--input-shape {shape}: input {declared.name!r} takes {_show(declared.shape)}, that is {len(own)} sizes "
            f"without the batch, such as {_example(own)}, not {shape}"
        )
    return ModelInput(declared.name, (declared.shape[0], *settled), declared.dtype)


def _example(sizes: Shape) -> str:
    return ",".join(str(size or 224) for size in sizes)


def _show(shape: Shape) -> str:
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"
