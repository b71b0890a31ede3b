"""Variables with a shape and no value: a model of any size is built in the memory of its Python objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kerasmem.models.backend import import_keras


@contextmanager
def weightless() -> Iterator[None]:
    """Build Keras objects inside without allocating one of their variables.

    Keras leaves the variables of a `StatelessScope` uninitialised until the scope ends. This one ends
    without initialising them, and takes them off Keras's list of variables still to be initialised,
    so that no later scope allocates them either. Variables given as values (an optimizer's learning
    rate) keep their value.
    """
    keras = import_keras()
    from keras.src.backend.common import global_state

    create = keras.Variable.__init__

    def create_deferred(self: Any, initializer: Any, shape: Any = None, dtype: Any = None, **options: Any) -> None:
        if not callable(initializer) and not isinstance(initializer, str):
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
            shape, dtype = tuple(value.shape), keras.backend.standardize_dtype(value.dtype)

            def initializer(shape: Any, dtype: Any = None) -> Any:
                return keras.ops.convert_to_tensor(value, dtype=dtype)

        create(self, initializer, shape=shape, dtype=dtype, **options)

    pending = "uninitialized_variables"
    before = list(global_state.get_global_attribute(pending) or [])
    try:
        with (
            keras.StatelessScope(initialize_variables=False),
            mock.patch.object(keras.Variable, "__init__", create_deferred),
        ):
            yield
    finally:
        global_state.set_global_attribute(pending, before)
