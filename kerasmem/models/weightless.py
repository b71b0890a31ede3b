"""Variables with a shape and no value: a model of any size is built in the memory of its Python objects."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kerasmem.compat.keras_layers import normalizations_untouched
from kerasmem.compat.keras_state import (
    ADD_FROM_REFERENCE,
    INIT,
    has_value,
    optimizers_know_stand_ins,
    stand_ins_for,
    variables_stay_uninitialized,
)
from kerasmem.compat.patching import ThreadStack, patched
from kerasmem.models.backend import import_keras, runs_on_jax


class _Shaped(threading.local):
    """A thread's variables that were made without a value and are still in use, by id."""

    def __init__(self) -> None:
        self.variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


_shaped = _Shaped()
_giving = ThreadStack()  # functions that give a new variable a stand-in while a step is being traced


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Draw this thread's numbers of `random` from a copy of its generator: Keras draws seeds there."""
    generator = random.Random()
    generator.setstate(random.getstate())
    with contextlib.ExitStack() as stack:
        for name in random.__all__:
            if (draw := getattr(generator, name, None)) is not None:
                stack.enter_context(patched(random, name, functools.partial(_without_first, draw)))
        yield


def _without_first(function: Callable[..., Any], replaced: object, /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Build Keras objects inside without allocating one of their variables.

    Keras leaves the variables of a `StatelessScope` uninitialised until the scope ends. This one ends
    without initialising them, and takes them off Keras's list of variables still to be initialised,
    so that no later scope allocates them either. Variables given as values (an optimizer's learning
    rate) keep their value, and an optimizer asks a weight for its shape only. Other threads see Keras
    as it is.
    """
    keras = import_keras()
    optimizer, name = ADD_FROM_REFERENCE.owner()
    # The backend's optimizer overrides this one, and reads the value to place the new variable beside it.
    add_by_shape = [vars(cls)[name] for cls in optimizer.__mro__ if name in vars(cls)][-1]

    def create_traced(create: Callable[..., None], variable: Any, initializer: Any, **options: Any) -> None:
        with keras.StatelessScope(initialize_variables=False):
            create(variable, initializer, **options)
        _giving.stack[-1](variable)

    def create_deferred(
        create: Callable[..., None], variable: Any, initializer: Any, shape: Any = None, dtype: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        if not callable(initializer) and not isinstance(initializer, str):
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
            shape, dtype = tuple(value.shape), keras.backend.standardize_dtype(value.dtype)

            def initializer(shape: Any, dtype: Any = None) -> Any:
                return keras.ops.convert_to_tensor(value, dtype=dtype)

        make = functools.partial(create_traced, create) if _giving.stack else create
        make(variable, initializer, shape=shape, dtype=dtype, **options)
        _shaped.variables[id(variable)] = variable

    with (
        variables_stay_uninitialized(),
        keras.StatelessScope(initialize_variables=False),
        patched(*INIT.owner(), create_deferred),
        patched(optimizer, name, functools.partial(_without_first, add_by_shape)),
        optimizers_know_stand_ins(),
        normalizations_untouched(),
    ):
        yield


@contextlib.contextmanager
def with_stand_ins(make: Callable[[Any], Any]) -> Iterator[None]:
    """Give every variable without a value a stand-in, so that a step can be traced outside Keras's stateless scopes.

    So are those given one that the step makes when it is run first, as an optimizer's slots and a layer's weights.

    Args:
        make: from a Keras variable to the `tf.Variable` that stands for it.
    """
    with stand_ins_for(shaped_variables(), make) as give, _giving.pushed(give):
        yield


def shaped_variables() -> list[Any]:
    """Return the variables in use that this thread made without a value, even if they have one by now."""
    return list(_shaped.variables.values())


def placeholders_for(variables: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that makes variables without a value placeholders of the graph.

    Keras would put in the operations that draw their first value, which takes longer than those of the layers. On JAX
    it does: there is no graph to hold a placeholder.
    """
    if runs_on_jax():
        return contextlib.nullcontext()
    import tensorflow as tf

    scope = import_keras().StatelessScope
    return scope(
        [(each, tf.compat.v1.placeholder(each.dtype, each.shape)) for each in variables if not has_value(each)],
        initialize_variables=False,
    )
