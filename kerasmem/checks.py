"""Checks of arguments: whole numbers, numbers, flags, choices, paths.

Each function takes the argument's name and value, and returns the value as a plain Python type. It raises `UsageError`
with the name, the allowed values and the value.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from kerasmem.errors import UsageError

T = TypeVar("T")
_MOST_SAMPLES = 2**31 - 1  # TensorFlow counts the samples of a batch in 32 bits

# Choices of arguments and options; `typing.get_args` lists them.
MethodName = Literal["auto", "formula", "graph", "xla", "gpu-target", "probe"]
Mode = Literal["train", "evaluate", "inference"]
Color = Literal["rgb", "gray"]
Decimal = Literal[".", ","]
RowsAxis = Literal["first", "last"]


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return a whole number, including NumPy's.

    Examples:
        >>> whole("batch_size", 32)
        32
    """
    if not isinstance(value, Integral) or not _is_between(value, least, most):
        raise UsageError(f"{name} must be a whole number{_range(least, most)}; got {value!r}")
    return int(value)


def batch_size(name: str, value: Any, method: str | None) -> int:
    """Return a number of samples that TensorFlow can count, or any number for the formula."""
    return whole(name, value, most=None if method == "formula" else _MOST_SAMPLES)


def number(name: str, value: Any, least: float = 0.0, most: float | None = None) -> float:
    """Return a finite number from `least` to `most`."""
    is_finite = isinstance(value, Real) and float("-inf") < float(value) < float("inf")
    if not is_finite or not _is_between(value, least, most):
        raise UsageError(f"{name} must be a number{_range(least, most)}; got {value!r}")
    return float(value)


def _is_between(value: Any, least: float, most: float | None) -> bool:
    return not isinstance(value, bool) and least <= value and (most is None or value <= most)


def _range(least: float, most: float | None) -> str:
    if most is not None:
        return f" from {least:,} to {most:,}"
    return f" of at least {least:,}" if least > -sys.maxsize else ""


def flag(name: str, value: Any) -> bool:
    """Return True or False, including NumPy's."""
    if isinstance(value, bool) or (type(value).__name__ in ("bool", "bool_") and hasattr(value, "dtype")):
        return bool(value)
    raise UsageError(f"{name} must be True or False; got {value!r}")


def choice(name: str, value: T, choices: Sequence[T]) -> T:
    """Return a value if it is one of the choices. The error suggests the nearest one."""
    for option in choices:
        if type(option) is type(value) and option == value:
            return value
    *others, last = map(repr, choices)
    raise UsageError(f"{name} must be {', '.join(others)} or {last}; got {value!r}{nearest(value, choices)}")


def keywords(function: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check the keyword arguments of a function that takes `**settings`.

    Raises:
        TypeError: If a name is unknown. The error suggests the nearest one.
    """
    for name in names:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{nearest(name, known)}")


def nearest(value: object, choices: Iterable[object]) -> str:
    """Return the end of a message that suggests the most similar choice, or "" if none is similar."""
    import difflib  # not needed to start the command line

    texts = {str(option).lower(): str(option) for option in choices}
    matches = difflib.get_close_matches(str(value).lower(), list(texts), n=1)
    return f"; did you mean {texts[matches[0]]!r}?" if matches else ""


def path(name: str, value: Any) -> str:
    """Return the path of a file or folder as text, without making it absolute."""
    with contextlib.suppress(TypeError, UnicodeEncodeError):
        text = os.fspath(value)
        if isinstance(text, str) and "\0" not in text and os.fsencode(text):
            return text
    raise UsageError(f"{name} must be the path of a file or folder; got {value!r}")


def function(name: str, value: Any) -> Any:
    """Return a callable."""
    if not callable(value):
        raise UsageError(f"{name} must be a function; got {value!r}")
    return value
