"""Models with a training step or optimizers of their own, and the step function of a custom loop as one of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.models.backend import import_keras
from kerasmem.models.vocabulary import is_of_a_library


def takes_settings(model: Any) -> bool:
    """Return whether the model's `compile` can be given an optimizer, a loss and metrics as Keras's own can."""
    parameters = inspect.signature(model.compile).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or {"optimizer", "loss", "metrics", "jit_compile"} <= set(parameters)


def has_own_step(model: Any) -> bool:
    """Return whether the model's class brings a training step of its own."""
    keras = import_keras()
    return type(model).train_step not in (keras.Model.train_step, keras.Sequential.train_step)


def has_call(model: Any) -> bool:
    """Return whether the model has a `call`, and not a `train_step` alone."""
    return type(model).call is not import_keras().Model.call


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers in the attributes of a model and of the models inside it, each once.

    The one it was compiled with comes first, one inside another behind it.
    """
    optimizer_class = import_keras().Optimizer
    kept = (value for each in flatten_layers(model) for attribute in vars(each).values() for value in _in(attribute))
    optimizers: dict[int, Any] = {}
    for optimizer in (getattr(model, "optimizer", None), *kept):
        for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
            if isinstance(each, optimizer_class):
                optimizers.setdefault(id(each), each)
    return list(optimizers.values())


def optimizer_variables(model: Any) -> list[Any]:
    """Return the variables of all optimizers of a model, each once."""
    variables = {id(variable): variable for optimizer in optimizers_of(model) for variable in optimizer.variables}
    return list(variables.values())


def variables_of(model: Any, mode: str = "train") -> dict[int, tuple[Any, str]]:
    """Return the variables of a model, of its metrics and, if it trains, of its optimizers, by their ids.

    Each comes with its kind, "weights", "metrics" or "optimizer", in the order in which Keras makes them.
    """
    metrics = {id(each) for each in model.metrics_variables}
    variables = {
        id(each): (each, "metrics" if id(each) in metrics else "weights")
        for each in (*model.variables, *model.metrics_variables)
    }
    for each in optimizer_variables(model) if mode == "train" else ():
        variables.setdefault(id(each), (each, "optimizer"))
    return variables


def keeps_optimizers(model: Any) -> bool:
    """Return whether a model has optimizers beside the one that Keras's `compile` gave it."""
    own = getattr(model, "optimizer", None)
    return any(each not in (own, getattr(own, "inner_optimizer", None)) for each in optimizers_of(model))


def _in(value: Any) -> Iterator[Any]:
    """Yield an attribute's value, or the values in it if it is a list or a dictionary."""
    yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)


_MOST_ITEMS = 1000  # of a list or dictionary that is looked through: a longer one holds data


def as_loop(made: Any) -> Any:
    """Wrap a step function in a Keras model with the models and optimizers that it uses.

    They are those that the function refers to: by closure, as globals, as attributes of its object, or through other
    functions of the user's.

    Args:
        made: what a factory returned: a function, also a `tf.function` or a method, that takes a batch; or a tuple of
            what it uses, with the function last.

    Returns:
        The model; None if there is no such function.
    """
    *more, step = made if isinstance(made, tuple) and made else (made,)
    is_graph = hasattr(step, "python_function")  # a `tf.function`
    function = getattr(step, "__wrapped__", step) if is_graph else step
    if not inspect.isroutine(function):
        return None
    owner = getattr(function, "__self__", None)
    if is_graph and is_of_a_library(owner):
        owner = getattr(owner, "target", owner)  # a `tf.function` refers weakly to the object that it is a method of
    plain = getattr(function, "__func__", function)
    called = _with_control_flow(plain) if is_graph else plain
    used = _used([*more, owner, plain])
    model = _loop_class()(called if owner is None else MethodType(called, owner), used)
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
        """Calls a function for each batch, with its layers, metrics and optimizers as attributes."""

        def __init__(self, step: Callable[..., Any], used: list[Any]) -> None:
            name = getattr(step, "__name__", "")
            super().__init__(name=name if name.isidentifier() else "step")
            required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            arguments = inspect.signature(step).parameters.values()
            self.loop_step = step
            self.loop_arguments = tuple(x.name for x in arguments if x.default is x.empty and x.kind in required)
            self.loop_layers = [each for each in used if isinstance(each, keras.Layer)]
            self.loop_metrics = [each for each in used if isinstance(each, keras.Metric)]
            self.loop_optimizers = [each for each in used if isinstance(each, keras.Optimizer)]
            self.compile()

        def compile(self) -> None:
            super().compile(optimizer=next(iter(self.loop_optimizers), None), loss=None)

        @property
        def inputs(self) -> Any:
            """Those of the only model that the function uses, if it declares them."""
            return getattr(self.loop_layers[0], "inputs", None) if len(self.loop_layers) == 1 else None

        @property
        def input(self) -> Any:
            return self.loop_layers[0].input

        def train_step(self, data: Any) -> dict[str, Any]:
            made = _called(self.loop_step, self.loop_arguments, data)
            return {f"output_{place}": each for place, each in enumerate(keras.tree.flatten(made)) if each is not None}

    return StepFunction


def _called(step: Callable[..., Any], arguments: tuple[str, ...], data: Any) -> Any:
    """Call a step function: by the names of its arguments, one by one, or with all in one if it takes one."""
    known = {*inspect.signature(step).parameters}
    named: dict[str, Any] = {}
    others = _without_named(data if isinstance(data, tuple) else (data,), known, named)
    if len(others) == 1 and isinstance(others[0], (tuple, list)) and len(arguments) > 1:  # inputs without names
        others = _without_named(others[0], known, named)
    return step(tuple(others), **named) if len(others) > 1 == len(arguments) else step(*others, **named)


def _without_named(parts: Iterable[Any], known: set[str], named: dict[str, Any]) -> list[Any]:
    """Move parts that have the names of arguments to `named`, and return the others."""
    others = []
    for part in parts:
        if isinstance(part, Mapping) and set(part) <= known:
            named.update(part)
        else:
            others.append(part)
    return others


def _with_control_flow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert control flow over tensors as `tf.function` does."""
    import tensorflow as tf

    try:
        converted: Callable[..., Any] = tf.autograph.to_graph(function)
    except Exception:  # one whose source is not at hand; `tf.function` takes it as it is, too
        return function
    converted.__name__ = function.__name__
    return converted


def _used(seeds: list[Any]) -> list[Any]:
    """Return the layers, metrics and optimizers that are reached from some objects, those inside another left out."""
    keras = import_keras()
    parts: list[Any] = []
    seen: dict[int, Any] = {}
    pending = [*seeds]
    while pending:
        value = pending.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that ids stay unique
        if isinstance(value, (keras.Layer, keras.Metric, keras.Optimizer)):
            parts.append(value)
        else:
            pending += _inside(value)
    layers = [each for each in parts if isinstance(each, keras.Layer)]
    inner = {id(one) for each in layers for one in flatten_layers(each, include_self=False)}
    inner |= {id(each.inner_optimizer) for each in parts if hasattr(each, "inner_optimizer")}
    return [each for each in parts if id(each) not in inner]


def _inside(value: Any) -> list[Any]:
    """Return the objects that an object refers to."""
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
