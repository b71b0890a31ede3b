"""Keras's state of a thread: the attributes that its scopes set, and the scopes that are not public."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

_GLOBAL = "keras.src.backend.common.global_state"
_TRACING = "estimates that trace the model, kerasmem.recompute, kerasmem.fit"
_RECOMPUTE = "kerasmem.recompute"
_GET = Borrowed(f"{_GLOBAL}:get_global_attribute(name)", feature=_TRACING)
_SET = Borrowed(f"{_GLOBAL}:set_global_attribute(name, value)", feature=_TRACING)
_SAFE_MODE = Borrowed(
    "keras.src.saving.serialization_lib:SafeModeScope(safe_mode)",
    feature="Keras's safe mode where the program has switched it off (kerasmem's own checks stay)",
)
_IN_SYMBOLIC_SCOPE = Borrowed("keras.src.backend.common.symbolic_scope:in_symbolic_scope", feature=_RECOMPUTE)
_AUTOCAST = Borrowed("keras.src.backend:AutocastScope(dtype)", feature=_RECOMPUTE)
_GET_AUTOCAST = Borrowed("keras.src.backend:get_autocast_scope", feature=_RECOMPUTE)
_GET_MASK = Borrowed("keras.src.backend:get_keras_mask(x)", feature=_RECOMPUTE)
_SET_MASK = Borrowed("keras.src.backend:set_keras_mask(x, mask)", feature=_RECOMPUTE)

# Keras 3.12 has no constant for it.
GLOBAL_SEED = "global_seed_generator"
CALL_CONTEXT = "current_call_ctx"
STATELESS_SCOPE = "stateless_scope"


def attribute(name: str) -> Any:
    """Return an attribute of Keras's state in this thread, None if it is not set."""
    return _GET.get()(name)


@contextlib.contextmanager
def attributes_set(**values: Any) -> Iterator[None]:
    """Set attributes of Keras's state, and restore the previous values."""
    put = _SET.get()
    before = {name: attribute(name) for name in values}
    try:
        for name, value in values.items():
            put(name, value)
        yield
    finally:
        for name, value in before.items():
            put(name, value)


@contextlib.contextmanager
def variables_stay_uninitialized() -> Iterator[None]:
    """Take the variables that are made without a value inside off Keras's list of those still to be initialised.

    If Keras has no such list, nothing is done: they may get values when a later scope ends.
    """
    try:
        pending = list(attribute("uninitialized_variables") or [])
    except NotAvailableError:
        yield
        return
    try:
        yield
    finally:
        _SET.get()("uninitialized_variables", pending)


def safe_mode(on: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that turns Keras's safe mode on or off."""
    try:
        scope: contextlib.AbstractContextManager[Any] = _SAFE_MODE.get()(on)
    except NotAvailableError:
        return contextlib.nullcontext()
    return scope


def in_symbolic_scope() -> bool:
    """Return whether Keras only asks for shapes here."""
    return bool(_IN_SYMBOLIC_SCOPE.get()())


def in_training_call() -> bool:
    """Return whether the outermost layer that is being called was called with `training=True`."""
    call = attribute(CALL_CONTEXT)
    return call is not None and call.get_value("training") is True


def autocast_dtype() -> str | None:
    """Return the dtype that Keras casts variables to here, or None."""
    scope = _GET_AUTOCAST.get()()
    return None if scope is None else scope.dtype


def autocast(dtype: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that casts variables to a dtype (None: no casts)."""
    scope: contextlib.AbstractContextManager[Any] = _AUTOCAST.get()(dtype)
    return scope


def mask_of(tensor: Any) -> Any:
    """Return Keras's mask on a tensor, or None."""
    return None if tensor is None else _GET_MASK.get()(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Put Keras's mask on a tensor, unless it is None."""
    if mask is not None:
        _SET_MASK.get()(tensor, mask)


def global_seed_state() -> Any:
    """Return the variable of the shared seed generator, or None."""
    generator = attribute(GLOBAL_SEED)
    return None if generator is None else generator.state
