"""Keras's thread-local state, and its variables without values."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.patching import patch

_GLOBAL = "keras.src.backend.common.global_state"
_TRACING = "estimates that trace the model, kerasmem.recompute, kerasmem.fit"
_RECOMPUTE = "kerasmem.recompute"
# Returns an attribute of Keras's state in this thread, or None.
attribute = Borrowed(f"{_GLOBAL}:get_global_attribute", feature=_TRACING)
_SET = Borrowed(f"{_GLOBAL}:set_global_attribute", feature=_TRACING)
_SAFE_MODE = Borrowed(
    "keras.src.saving.serialization_lib:SafeModeScope",
    feature="Keras's safe mode if the program has switched it off (kerasmem's own checks stay)",
)
# Returns whether Keras only infers shapes.
in_symbolic_scope = Borrowed("keras.src.backend.common.symbolic_scope:in_symbolic_scope", feature=_RECOMPUTE)
# Scope that casts variables to a dtype; None disables it.
autocast = Borrowed("keras.src.backend:AutocastScope", feature=_RECOMPUTE)
_GET_AUTOCAST = Borrowed("keras.src.backend:get_autocast_scope", feature=_RECOMPUTE)
mask_of = Borrowed("keras.src.backend:get_keras_mask", feature=_RECOMPUTE)
_SET_MASK = Borrowed("keras.src.backend:set_keras_mask", feature=_RECOMPUTE)

# Keras 3.12 has no constant for it.
GLOBAL_SEED = "global_seed_generator"
CALL_CONTEXT = "current_call_ctx"
STATELESS_SCOPE = "stateless_scope"
_STAND_INS = "estimates that trace the model (graph, xla, gpu-target, probe), kerasmem.recompute"
INIT = Borrowed("keras:Variable.__init__", feature="estimates")
ADD_FROM_REFERENCE = Borrowed("keras:Optimizer.add_variable_from_reference", feature="estimates")
VAR_KEY = Borrowed("keras:Optimizer._var_key", feature=_STAND_INS)
_UNINITIALIZED = Borrowed("tensorflow.python.ops.resource_variable_ops:UninitializedVariable", feature=_STAND_INS)
INITIALIZE = Borrowed("keras:Variable._deferred_initialize", feature="real steps of a model")
_STANDS_FOR: dict[int, Any] = {}  # id of a stand-in → the optimizer's key of the variable


@contextlib.contextmanager
def attributes_set(**values: Any) -> Iterator[None]:
    """Set attributes of Keras's state while the context lasts."""
    set_attribute = _SET.get()
    previous = {name: attribute(name) for name in values}
    try:
        for name, value in values.items():
            set_attribute(name, value)
        yield
    finally:
        for name, value in previous.items():
            set_attribute(name, value)


@contextlib.contextmanager
def names_restarted() -> Iterator[None]:
    """Restart the numbers in names of new layers while the context lasts."""
    if not _SET.exists():
        yield
        return
    with attributes_set(object_name_uids=collections.defaultdict(int)):
        yield


def wraps_container(value: Any) -> bool:
    """Return whether a value is TensorFlow's substitute for a list or dictionary in an attribute of a Keras object."""
    return type(value).__module__.startswith("tensorflow.python.trackable")


@contextlib.contextmanager
def names_kept() -> Iterator[None]:
    """Continue the numbers in names of new objects, and restore them and the global seeds when the context ends."""
    if not _SET.exists():
        yield
        return
    numbers = collections.defaultdict(int, attribute("object_name_uids") or {})
    with attributes_set(object_name_uids=numbers, **{GLOBAL_SEED: attribute(GLOBAL_SEED)}):
        yield


@contextlib.contextmanager
def variables_stay_uninitialized() -> Iterator[None]:
    """Remove new variables from Keras's list of uninitialized variables when the context ends.

    If Keras lacks the list, a later scope may initialize them.
    """
    if not attribute.exists():
        yield
        return
    pending = list(attribute("uninitialized_variables") or [])
    try:
        yield
    finally:
        _SET("uninitialized_variables", pending)


def safe_mode(on: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a scope with Keras's safe mode on or off."""
    return _SAFE_MODE(on) if _SAFE_MODE.exists() else contextlib.nullcontext()


def in_training_call() -> bool:
    """Return whether the current outermost call of a layer has `training=True`."""
    call = attribute(CALL_CONTEXT)
    return call is not None and call.get_value("training") is True


def autocast_dtype() -> str | None:
    """Return the dtype that Keras currently casts variables to, or None."""
    scope = _GET_AUTOCAST()
    return None if scope is None else scope.dtype


def set_mask(tensor: Any, mask: Any) -> None:
    """Set Keras's mask of a tensor, unless it is None."""
    if mask is not None:
        _SET_MASK(tensor, mask)


def global_seed_state() -> Any:
    """Return the state of the global seed generator, or None."""
    generator = attribute(GLOBAL_SEED)
    return None if generator is None else generator.state


def raw_value(variable: Any) -> Any:
    """Return the backend's variable of a Keras variable, or None if it has no value yet."""
    return variable._value


def has_value(variable: Any) -> bool:
    """Return whether the variable has a value."""
    return raw_value(variable) is not None


def give_value(variable: Any) -> None:
    """Initialise the variable if it has no value yet."""
    if not has_value(variable):
        INITIALIZE(variable)


def index_variables(optimizer: Any) -> None:
    """Update an optimizer's index after its variables received values."""
    if optimizer.built and VAR_KEY.exists():
        key = VAR_KEY.get()
        variables = enumerate(optimizer._trainable_variables)
        optimizer._trainable_variables_indices = {key(optimizer, variable): index for index, variable in variables}


def handle_only(variable: Any) -> Any:
    """Create a TensorFlow variable with the handle and shape of a Keras variable, without memory."""
    import tensorflow as tf

    with tf.init_scope():
        return _UNINITIALIZED(
            trainable=is_watched(variable), name=variable.name, dtype=variable.dtype, shape=tuple(variable.shape)
        )


def is_watched(variable: Any) -> bool:
    """Return whether gradient tapes watch a variable: as it was created, since freezing it later changes only Keras."""
    if (value := raw_value(variable)) is None:
        return bool(getattr(variable, "_created_trainable", variable.trainable))
    return bool(value.trainable)


def created_without_value(variable: Any) -> None:
    """Keep whether gradient tapes would watch a variable that has no value yet."""
    variable._created_trainable = variable.trainable


def optimizers_know_stand_ins() -> contextlib.AbstractContextManager[None]:
    """Make optimizers in this thread treat a stand-in as its Keras variable."""
    try:
        owner = VAR_KEY.owner()
    except NotAvailableError:
        return contextlib.nullcontext()
    return patch(*owner, _key)


def _key(var_key: Callable[..., Any], optimizer: Any, variable: Any) -> Any:
    """Return an optimizer's key of a variable, of its stand-in, or of a variable without a value."""
    value = getattr(variable, "_value", variable)
    if value is None:
        return id(variable)
    return _STANDS_FOR[id(value)] if id(value) in _STANDS_FOR else var_key(optimizer, variable)


@contextlib.contextmanager
def stand_ins_for(variables: Iterable[Any], make: Callable[[Any], Any]) -> Iterator[Callable[[Any], None]]:
    """Give variables a stand-in, so that a step can be traced outside of Keras's stateless scopes.

    Yields a function that gives another variable a stand-in.

    Args:
        variables: Keras variables. Their values return when the context ends.
        make: function from a Keras variable to its stand-in, a `tf.Variable`.
    """
    replaced = []

    def give(variable: Any) -> None:
        value = variable._value
        key = id(variable) if value is None else value._unique_id
        replaced.append((variable, value))
        variable._value = make(variable)
        _STANDS_FOR[id(variable._value)] = key

    with attributes_set(stateless_scope=None):
        try:
            for variable in variables:
                give(variable)
            yield give
        finally:
            for variable, value in reversed(replaced):
                _STANDS_FOR.pop(id(variable._value), None)
                variable._value = value
