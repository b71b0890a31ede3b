"""Variables with a shape and no value: a model of any size is built in the memory of its Python objects."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from kerasmem.compat.keras_state import variables_stay_uninitialized
from kerasmem.compat.keras_variables import has_value, optimizers_know_stand_ins, stand_ins_for
from kerasmem.models.backend import TENSORFLOW, import_keras, keras_backend

# Every variable that was made without a value and is still in use.
_SHAPED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_Give = Callable[[Any], None]
_giving: list[_Give] = []  # what gives a variable that is made now a stand-in: a step is being traced


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the user's random numbers as if no model had been built here: Keras draws seeds from Python's."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


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
    owner = threading.get_ident()
    name = "add_variable_from_reference"
    add_from_reference = getattr(keras.Optimizer, name)
    # What the backend's optimizer overrides, which reads the value to place the new variable beside it.
    add_by_shape = [vars(each)[name] for each in keras.Optimizer.__mro__ if name in vars(each)][-1]

    def add_shaped(self: Any, reference_variable: Any, *args: Any, **options: Any) -> Any:
        add = add_by_shape if threading.get_ident() == owner else add_from_reference
        return add(self, reference_variable, *args, **options)

    create = keras.Variable.__init__

    def create_traced(self: Any, initializer: Any, **options: Any) -> None:
        with keras.StatelessScope(initialize_variables=False):
            create(self, initializer, **options)
        _giving[-1](self)

    def create_deferred(self: Any, initializer: Any, shape: Any = None, dtype: Any = None, **options: Any) -> None:
        deferred = threading.get_ident() == owner
        if deferred and not callable(initializer) and not isinstance(initializer, str):
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
            shape, dtype = tuple(value.shape), keras.backend.standardize_dtype(value.dtype)

            def initializer(shape: Any, dtype: Any = None) -> Any:
                return keras.ops.convert_to_tensor(value, dtype=dtype)

        make = create_traced if deferred and _giving else create
        make(self, initializer, shape=shape, dtype=dtype, **options)
        if deferred:
            _SHAPED[id(self)] = self

    with (
        variables_stay_uninitialized(),
        keras.StatelessScope(initialize_variables=False),
        mock.patch.object(keras.Variable, "__init__", create_deferred),
        mock.patch.object(keras.Optimizer, name, add_shaped),
        optimizers_know_stand_ins(),
    ):
        yield


@contextlib.contextmanager
def with_stand_ins(make: Callable[[Any], Any]) -> Iterator[None]:
    """Give every variable without a value a stand-in, so that a step can be traced outside Keras's stateless scopes.

    So are those given one that the step makes when it is run first, as an optimizer's slots and a layer's weights.

    Args:
        make: from a Keras variable to the `tf.Variable` that stands for it.
    """
    with stand_ins_for(shaped_variables(), make) as give:
        _giving.append(give)
        try:
            yield
        finally:
            _giving.pop()


def shaped_variables() -> list[Any]:
    """Return the variables in use that were made without a value, those included that have one by now."""
    return list(_SHAPED.values())


def placeholders_for(variables: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that makes variables without a value placeholders of the graph.

    Keras would put in the operations that draw their first value, which takes longer than those of the layers. On JAX
    it does: there is no graph to hold a placeholder.
    """
    if keras_backend() != TENSORFLOW:
        return contextlib.nullcontext()
    import tensorflow as tf

    scope = import_keras().StatelessScope
    return scope(
        [(each, tf.compat.v1.placeholder(each.dtype, each.shape)) for each in variables if not has_value(each)],
        initialize_variables=False,
    )
