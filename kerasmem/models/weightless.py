"""Variables without values, to build and trace models of any size without allocating weights."""

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
    created_without_value,
    has_value,
    optimizers_know_stand_ins,
    stand_ins_for,
    variables_stay_uninitialized,
)
from kerasmem.compat.patching import ThreadStack, patch
from kerasmem.models.backend import import_keras, runs_on_jax


class _Shaped(threading.local):
    """Variables that this thread created without a value and still uses, by id."""

    def __init__(self) -> None:
        self.variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


_shaped = _Shaped()
_giving = ThreadStack()  # functions that give a new variable a stand-in during a trace


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Keep the state of `random`: numbers that this thread draws, such as Keras's seeds, are from a copy."""
    generator = random.Random()
    generator.setstate(random.getstate())
    with contextlib.ExitStack() as stack:
        for name in random.__all__:
            if (draw := getattr(generator, name, None)) is not None:
                stack.enter_context(patch(random, name, functools.partial(_without_first, draw)))
        yield


def _without_first(function: Callable[..., Any], replaced: object, /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Build Keras objects in this thread without allocating their variables.

    Keras initializes the variables of a `StatelessScope` when the scope ends. This context skips that, and removes the
    variables from Keras's list of uninitialized variables, so that no later scope allocates them. Variables with a
    constant value (an optimizer's learning rate) keep it, and optimizers read only the shapes of weights.
    """
    keras = import_keras()
    optimizer, name = ADD_FROM_REFERENCE.owner()
    # Skip the backend's override, which reads the value to choose the new variable's device.
    add_by_shape = [vars(cls)[name] for cls in optimizer.__mro__ if name in vars(cls)][-1]

    def create_traced(create: Callable[..., None], variable: Any, initializer: Any, **options: Any) -> None:
        # A scope that infers the shapes of inner layers would initialize the variable when it ends.
        with variables_stay_uninitialized(), keras.StatelessScope(initialize_variables=False):
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
        created_without_value(variable)

    with (
        variables_stay_uninitialized(),
        keras.StatelessScope(initialize_variables=False),
        patch(*INIT.owner(), create_deferred),
        patch(optimizer, name, functools.partial(_without_first, add_by_shape)),
        optimizers_know_stand_ins(),
        normalizations_untouched(),
    ):
        yield


@contextlib.contextmanager
def with_stand_ins(make: Callable[[Any], Any], others: Iterable[Any] = ()) -> Iterator[None]:
    """Give each variable without a value a stand-in, so that a step can be traced outside of Keras's stateless scopes.

    Variables that the first step creates get one too, such as an optimizer's slots and a layer's weights.

    Args:
        make: function from a Keras variable to its stand-in, a `tf.Variable`.
        others: variables with a value that get a stand-in too. Defaults to none.
    """
    bare = [variable for variable in shaped_variables() if not has_value(variable)]
    with stand_ins_for([*bare, *others], make) as give, _giving.push(give):
        yield


def shaped_variables() -> list[Any]:
    """Return the variables that this thread created without a value, even if they have one now."""
    return list(_shaped.variables.values())


def placeholders_for(variables: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that replaces variables without a value by placeholders of the graph.

    Otherwise, Keras adds the operations of their initializers, which takes longer than the layers. JAX has no graph for
    placeholders, so nothing is replaced there.
    """
    if runs_on_jax():
        return contextlib.nullcontext()
    import tensorflow as tf

    scope = import_keras().StatelessScope
    return scope(
        [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in variables if not has_value(v)],
        initialize_variables=False,
    )
