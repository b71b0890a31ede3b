"""Models with a custom training step or optimizers, and step functions of custom training loops."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.models.backend import import_keras
from kerasmem.models.user_code import is_of_a_library


def takes_settings(model: Any) -> bool:
    """Return whether the model's `compile` has the optimizer, loss and metrics arguments of Keras."""
    parameters = inspect.signature(model.compile).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or {"optimizer", "loss", "metrics", "jit_compile"} <= set(parameters)


def compiles_as_keras(model: Any) -> bool:
    """Return whether all arguments of the model's `compile` are Keras's."""
    return {*inspect.signature(model.compile).parameters} <= {
        *inspect.signature(import_keras().Model.compile).parameters
    }


def has_own_compile_config(model: Any) -> bool:
    """Return whether the model's class overrides `compile_from_config`."""
    return type(model).compile_from_config is not import_keras().Model.compile_from_config


def has_own_step(model: Any) -> bool:
    """Return whether the model's class overrides `train_step`."""
    keras = import_keras()
    return type(model).train_step not in (keras.Model.train_step, keras.Sequential.train_step)


def has_call(model: Any) -> bool:
    """Return whether the model's class overrides `call`."""
    return type(model).call is not import_keras().Model.call


def optimizers_of(model: Any) -> list[Any]:
    """Return the unique optimizers in the attributes of a model and its inner models.

    The optimizer of `compile` is first. An inner optimizer follows its outer one.
    """
    optimizer_class = import_keras().Optimizer
    values = (
        value for layer in flatten_layers(model) for attribute in vars(layer).values() for value in _in(attribute)
    )
    optimizers: dict[int, Any] = {}
    for value in (getattr(model, "optimizer", None), *values):
        for optimizer in (value, getattr(value, "inner_optimizer", None)):
            if isinstance(optimizer, optimizer_class):
                optimizers.setdefault(id(optimizer), optimizer)
    return list(optimizers.values())


def optimizer_variables(model: Any) -> list[Any]:
    """Return the unique variables of all optimizers of a model."""
    variables = {id(variable): variable for optimizer in optimizers_of(model) for variable in optimizer.variables}
    return list(variables.values())


def variables_of(model: Any, mode: str = "train") -> dict[int, tuple[Any, str]]:
    """Map ids to the variables of a model, its metrics and, if `mode` is "train", its optimizers.

    Each variable has its kind, "weights", "metrics" or "optimizer". The order is that of their creation by Keras.
    """
    metrics = {id(variable) for variable in model.metrics_variables}
    variables = {
        id(variable): (variable, "metrics" if id(variable) in metrics else "weights")
        for variable in (*model.variables, *model.metrics_variables)
    }
    for variable in optimizer_variables(model) if mode == "train" else ():
        variables.setdefault(id(variable), (variable, "optimizer"))
    return variables


def keeps_optimizers(model: Any) -> bool:
    """Return whether a model has optimizers besides that of `compile`."""
    compiled = getattr(model, "optimizer", None)
    inner = getattr(compiled, "inner_optimizer", None)
    return any(optimizer not in (compiled, inner) for optimizer in optimizers_of(model))


def _in(value: Any) -> Iterator[Any]:
    """Yield an attribute's value, or the items of a list or dictionary."""
    yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)


_MOST_ITEMS = 1000  # longer lists and dictionaries contain data, and are not searched


def as_loop(result: Any) -> Any:
    """Wrap a step function in a Keras model with the models and optimizers that it uses.

    They are those in its closure, its globals, the attributes of its object, and in other functions of the user.

    Args:
        result: result of a factory: a function, `tf.function` or method with a batch as its argument, or a tuple of
            objects that the function uses and the function.

    Returns:
        The model, or None if the object is not a function.
    """
    *more, step = result if isinstance(result, tuple) and result else (result,)
    is_graph = hasattr(step, "python_function")  # a `tf.function`
    function = getattr(step, "__wrapped__", step) if is_graph else step
    if not inspect.isroutine(function):
        return None
    owner = getattr(function, "__self__", None)
    if is_graph and is_of_a_library(owner):
        owner = getattr(owner, "target", owner)  # a `tf.function` of a method has a weak reference to its object
    plain = getattr(function, "__func__", function)
    converted = _with_control_flow(plain) if is_graph else plain
    parts = _keras_parts([*more, owner, plain])
    model = _loop_class()(converted if owner is None else MethodType(converted, owner), parts)
    model.loop_jit_compile = bool(getattr(getattr(step, "function_spec", None), "jit_compile", None))
    return model


def step_arguments(model: Any) -> tuple[str, ...] | None:
    """Return the arguments of a wrapped step function, or None for any other model."""
    arguments: tuple[str, ...] | None = getattr(model, "loop_arguments", None)
    return arguments


def loop_is_compiled(model: Any) -> bool | None:
    """Return whether XLA compiles a wrapped step function, or None for any other model."""
    return None if step_arguments(model) is None else bool(model.loop_jit_compile)


@functools.cache
def _loop_class() -> Any:
    keras = import_keras()

    class StepFunction(keras.Model):  # type: ignore[name-defined]
        """Model that calls a step function for each batch."""

        def __init__(self, step: Callable[..., Any], parts: list[Any]) -> None:
            name = getattr(step, "__name__", "")
            super().__init__(name=name if name.isidentifier() else "step")
            required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            arguments = inspect.signature(step).parameters.values()
            self.loop_step = step
            self.loop_arguments = tuple(
                item.name for item in arguments if item.default is item.empty and item.kind in required
            )
            self.loop_layers = [part for part in parts if isinstance(part, keras.Layer)]
            self.loop_metrics = [part for part in parts if isinstance(part, keras.Metric)]
            self.loop_optimizers = [part for part in parts if isinstance(part, keras.Optimizer)]
            self.compile()

        def compile(self) -> None:
            super().compile(optimizer=next(iter(self.loop_optimizers), None), loss=None)

        @property
        def inputs(self) -> Any:
            """The declared inputs of a single model that the function uses, or None."""
            return getattr(self.loop_layers[0], "inputs", None) if len(self.loop_layers) == 1 else None

        @property
        def input(self) -> Any:
            return self.loop_layers[0].input

        def train_step(self, data: Any) -> dict[str, Any]:
            outputs = keras.tree.flatten(_call_step(self.loop_step, self.loop_arguments, data))
            return {f"output_{index}": value for index, value in enumerate(outputs) if value is not None}

    return StepFunction


def _call_step(step: Callable[..., Any], arguments: tuple[str, ...], data: Any) -> Any:
    """Call a step function with named arguments, with one argument for each part, or with a single argument."""
    known = {*inspect.signature(step).parameters}
    named: dict[str, Any] = {}
    others = _without_named(data if isinstance(data, tuple) else (data,), known, named)
    if len(others) == 1 and isinstance(others[0], (tuple, list)) and len(arguments) > 1:  # inputs without names
        others = _without_named(others[0], known, named)
    return step(tuple(others), **named) if len(others) > 1 == len(arguments) else step(*others, **named)


def _without_named(parts: Iterable[Any], known: set[str], named: dict[str, Any]) -> list[Any]:
    """Move the arguments of a dictionary to `named`, and return the other parts."""
    others = []
    for part in parts:
        if isinstance(part, Mapping) and set(part) <= known:
            named.update(part)
        else:
            others.append(part)
    return others


def _with_control_flow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert control flow as `tf.function` does."""
    import tensorflow as tf

    try:
        converted: Callable[..., Any] = tf.autograph.to_graph(function)
    except Exception:  # without source code, `tf.function` does not convert it either
        return function
    converted.__name__ = function.__name__
    return converted


def _keras_parts(seeds: list[Any]) -> list[Any]:
    """Return the layers, metrics and optimizers that are reachable from some objects, without inner ones."""
    keras = import_keras()
    parts: list[Any] = []
    seen: dict[int, Any] = {}
    pending = [*seeds]
    while pending:
        value = pending.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value  # the reference keeps ids unique
        if isinstance(value, (keras.Layer, keras.Metric, keras.Optimizer)):
            parts.append(value)
        else:
            pending += _references(value)
    layers = [part for part in parts if isinstance(part, keras.Layer)]
    inner = {id(part) for layer in layers for part in flatten_layers(layer, include_self=False)}
    inner |= {id(part.inner_optimizer) for part in parts if hasattr(part, "inner_optimizer")}
    return [part for part in parts if id(part) not in inner]


def _references(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, set, dict)):
        return [*(value.values() if isinstance(value, dict) else value)] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if hasattr(value, "python_function"):
        return [getattr(value, "__wrapped__", None)]
    if isinstance(value, (ModuleType, type)) or is_of_a_library(value):
        return []
    if not isinstance(value, FunctionType):
        return [*getattr(value, "__dict__", {}).values()]
    variables = inspect.getclosurevars(value)
    return [*variables.nonlocals.values(), *variables.globals.values(), *(value.__defaults__ or ())]
