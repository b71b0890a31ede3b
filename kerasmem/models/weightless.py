"""Variables with a shape and no value: a model of any size is built in the memory of its Python objects."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kerasmem.models.backend import import_keras

# Every variable that was made without a value and is still in use.
_SHAPED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

_STANDS_FOR: dict[int, int] = {}  # id of a stand-in → id of the variable


@contextmanager
def weightless() -> Iterator[None]:
    """Build Keras objects inside without allocating one of their variables.

    Keras leaves the variables of a `StatelessScope` uninitialised until the scope ends. This one ends
    without initialising them, and takes them off Keras's list of variables still to be initialised,
    so that no later scope allocates them either. Variables given as values (an optimizer's learning
    rate) keep their value, and an optimizer asks a weight for its shape only. Other threads see Keras
    as it is.
    """
    keras = import_keras()
    from keras.src.backend.common import global_state
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    owner = threading.get_ident()
    add_from_reference, var_key = keras.Optimizer.add_variable_from_reference, keras.Optimizer._var_key

    def add_shaped(self: Any, reference_variable: Any, *args: Any, **options: Any) -> Any:
        add = BaseOptimizer.add_variable_from_reference if threading.get_ident() == owner else add_from_reference
        return add(self, reference_variable, *args, **options)

    def key_without_value(self: Any, variable: Any) -> Any:
        # A step that is traced hands its optimizer the stand-ins of `with_stand_ins`.
        return (
            _STANDS_FOR.get(id(variable), id(variable)) if threading.get_ident() == owner else var_key(self, variable)
        )

    create = keras.Variable.__init__

    def create_deferred(self: Any, initializer: Any, shape: Any = None, dtype: Any = None, **options: Any) -> None:
        deferred = threading.get_ident() == owner
        if deferred and not callable(initializer) and not isinstance(initializer, str):
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
            shape, dtype = tuple(value.shape), keras.backend.standardize_dtype(value.dtype)

            def initializer(shape: Any, dtype: Any = None) -> Any:
                return keras.ops.convert_to_tensor(value, dtype=dtype)

        create(self, initializer, shape=shape, dtype=dtype, **options)
        if deferred:
            _SHAPED[id(self)] = self

    pending = "uninitialized_variables"
    before = list(global_state.get_global_attribute(pending) or [])
    try:
        with (
            keras.StatelessScope(initialize_variables=False),
            mock.patch.object(keras.Variable, "__init__", create_deferred),
            mock.patch.object(keras.Optimizer, "add_variable_from_reference", add_shaped),
            mock.patch.object(keras.Optimizer, "_var_key", key_without_value),
        ):
            yield
    finally:
        global_state.set_global_attribute(pending, before)


@contextmanager
def with_stand_ins(make: Callable[[Any], Any]) -> Iterator[None]:
    """Give every variable without a value a stand-in, so that a step can be traced outside Keras's stateless scopes.

    Args:
        make: from a Keras variable to the `tf.Variable` that stands for it.
    """
    from keras.src.backend.common import global_state

    scope = global_state.get_global_attribute("stateless_scope")
    given = [variable for variable in list(_SHAPED.values()) if variable._value is None]
    try:
        global_state.set_global_attribute("stateless_scope", None)
        for variable in given:
            variable._value = make(variable)
            _STANDS_FOR[id(variable._value)] = id(variable)
        yield
    finally:
        for variable in given:
            _STANDS_FOR.pop(id(variable._value), None)
            variable._value = None
        global_state.set_global_attribute("stateless_scope", scope)
