"""Keras variables without their values, and stand-ins for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.keras_state import attributes_set
from kerasmem.compat.patching import patched

_TRACING = "estimates that trace the model (graph, xla, gpu-target, probe), kerasmem.recompute"
INIT = Borrowed("keras:Variable.__init__(initializer, shape, dtype)", feature="estimates")
ADD_FROM_REFERENCE = Borrowed("keras:Optimizer.add_variable_from_reference(reference_variable)", feature="estimates")
VAR_KEY = Borrowed("keras:Optimizer._var_key(variable)", feature=_TRACING)
_UNINITIALIZED = Borrowed("tensorflow.python.ops.resource_variable_ops:UninitializedVariable", feature=_TRACING)
INITIALIZE = Borrowed("keras:Variable._deferred_initialize", feature="real steps of a model")
_STANDS_FOR: dict[int, int] = {}  # id of a stand-in → id of the variable


def raw_value(variable: Any) -> Any:
    """Return the backend's variable behind a Keras variable, or None if it has no value yet."""
    return variable._value


def has_value(variable: Any) -> bool:
    """Return whether the variable has a value."""
    return raw_value(variable) is not None


def give_value(variable: Any) -> None:
    """Initialise the variable if it has no value yet."""
    if not has_value(variable):
        INITIALIZE.get()(variable)


def index_variables(optimizer: Any) -> None:
    """Let an optimizer that was built on variables without values know them by their values."""
    if optimizer.built and VAR_KEY.missing() is None:
        key = VAR_KEY.get()
        variables = enumerate(optimizer._trainable_variables)
        optimizer._trainable_variables_indices = {key(optimizer, variable): index for index, variable in variables}


def handle_only(variable: Any) -> Any:
    """Return a TensorFlow variable like a Keras variable that has a handle and a shape and no memory at all."""
    import tensorflow as tf

    with tf.init_scope():
        return _UNINITIALIZED.get()(
            trainable=variable.trainable, name=variable.name, dtype=variable.dtype, shape=tuple(variable.shape)
        )


def optimizers_know_stand_ins() -> contextlib.AbstractContextManager[None]:
    """Let optimizers in this thread take a stand-in for the variable that it stands for."""
    try:
        owner = VAR_KEY.owner()
    except NotAvailableError:
        return contextlib.nullcontext()
    return patched(*owner, lambda var_key, optimizer, variable: _STANDS_FOR.get(id(variable), id(variable)))


@contextlib.contextmanager
def stand_ins_for(variables: Iterable[Any], make: Callable[[Any], Any]) -> Iterator[Callable[[Any], None]]:
    """Give variables without a value a stand-in, so that a step can be traced outside Keras's stateless scopes.

    The context is a function that gives one more variable a stand-in.

    Args:
        variables: Keras variables; those that have a value keep it.
        make: from a Keras variable to the `tf.Variable` that stands for it.
    """
    given = []

    def give(variable: Any) -> None:
        given.append(variable)
        variable._value = make(variable)
        _STANDS_FOR[id(variable._value)] = id(variable)

    with attributes_set(stateless_scope=None):
        try:
            for variable in variables:
                if variable._value is None:
                    give(variable)
            yield give
        finally:
            for variable in given:
                _STANDS_FOR.pop(id(variable._value), None)
                variable._value = None
