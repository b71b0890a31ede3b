"""Leave a user's model as it was: restore the Python state of its objects after an estimate has traced it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from kerasmem.compat.keras_state import names_kept, wraps_container
from kerasmem.models.user_code import is_of_a_library

# Instances of these packages are not changed by a trace, or hold a state outside of Python.
_OPAQUE = frozenset({"tensorflow", "numpy", "jax", "jaxlib", "h5py", "threading", "_thread", "weakref", "concurrent"})
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, range, ModuleType)
_MOST_ITEMS = 100_000  # longer containers hold data, not layers
_COPIES: dict[type, Callable[[Any], Any]] = {list: list.copy, dict: dict.copy, set: set.copy, deque: deque.copy}


@contextlib.contextmanager
def state_restored(*roots: Any) -> Iterator[None]:
    """Restore the attributes and containers of objects, and of all objects that they refer to, when the context ends.

    These are layers, metrics, losses, optimizers, lists, dictionaries and the user's own objects, also if a function
    refers to them. The values of variables and tensors are not copied.

    Args:
        *roots: a Keras model and other objects of the user.
    """
    import numpy

    saved = list(_states(roots))
    drawn = numpy.random.get_state()
    try:
        with names_kept():
            yield
    finally:
        numpy.random.set_state(drawn)
        for value, kind, before in saved:
            _restore(value, kind, before)


def _restore(value: Any, kind: type, before: Any) -> None:
    """Give a container, or the attributes of an object, their earlier content. Overridden methods are not called."""
    if kind is dict:
        now = dict.copy(value)
        if len(now) != len(before) or any(now.get(key, now) is not item for key, item in before.items()):
            dict.clear(value)
            dict.update(value, before)
    elif kind is set:
        set.clear(value)
        set.update(value, before)
    elif kind is deque:
        deque.clear(value)
        deque.extend(value, before)
    else:
        list.__setitem__(value, slice(None), before)


def _states(roots: Iterable[Any]) -> Iterator[tuple[Any, type, Any]]:
    """Yield (container, its kind, copy of its content) for all containers that objects refer to."""
    pending, seen = list(roots), {}
    while pending:
        value = pending.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value  # keeps the id unique
        kind = next((base for base in _COPIES if base in type(value).__mro__), None)
        if kind is not None and len(value) <= _MOST_ITEMS:
            before = _COPIES[kind](value)
            yield value, kind, before
            pending += before.values() if kind is dict else before
        elif isinstance(value, (tuple, frozenset)):
            pending += value
        if kind is not None or not _is_opaque(value):
            attributes = _attributes(value)
            if attributes is not None:
                pending.append(attributes)
            pending += _references(value)


def _is_opaque(value: Any) -> bool:
    module = str(getattr(type(value), "__module__", ""))
    return module.partition(".")[0] in _OPAQUE and not wraps_container(value)


def _attributes(value: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _references(value: Any) -> list[Any]:
    """Return the objects that functions and methods of the user refer to."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if wraps_container(value):
        return [getattr(value, "__wrapped__", None)]
    if not isinstance(value, FunctionType):
        if is_of_a_library(value):
            return []
        members = (member for cls in type(value).__mro__ if not is_of_a_library(cls) for member in vars(cls).values())
        return [member for member in members if isinstance(member, FunctionType)]
    if is_of_a_library(value):
        return []
    try:
        used = inspect.getclosurevars(value)
    except ValueError:  # a cell without a value yet
        return []
    return [*used.nonlocals.values(), *used.globals.values(), *(value.__defaults__ or ())]
