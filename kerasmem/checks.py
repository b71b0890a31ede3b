"""Plain arguments, checked once for all rooms: whole numbers, numbers, flags, choices, names of files.

Every function takes the argument's name first, returns the value as a plain Python type, and raises `UsageError` with
the name, the value and what is wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from kerasmem.errors import UsageError

T = TypeVar("T")
_MOST_SAMPLES = 2**31 - 1  # of a batch: TensorFlow counts them in 32 bits

# The words that arguments of several rooms and options take; `typing.get_args` gives them.
MethodName = Literal["auto", "formula", "graph", "xla", "gpu-target", "probe"]
Mode = Literal["train", "evaluate", "inference"]
Color = Literal["rgb", "gray"]
Decimal = Literal[".", ","]
RowsAxis = Literal["first", "last"]


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Return a whole number, NumPy's kinds included.

    Examples:
        >>> whole("batch_size", 32)
        32
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name}: {value!r} is not a whole number; it must be {_range(least, most)}")
    plain = int(value)
    if plain < least or (most is not None and plain > most):
        size = "small" if plain < least else "large"
        raise UsageError(f"{name}: {plain:,} is too {size}; it must be {_range(least, most)}")
    return plain


def batch_size(name: str, value: Any, method: str | None) -> int:
    """Return how many samples a batch has: as many as TensorFlow can count, or any number for the formula."""
    return whole(name, value, most=None if method == "formula" else _MOST_SAMPLES)


def number(name: str, value: Any, least: float = 0.0, most: float | None = None) -> float:
    """Return a finite number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float("-inf") < float(value) < float("inf"):
        raise UsageError(f"{name}: {value!r} is not a number; it must be {_range(least, most)}")
    plain = float(value)
    if plain < least or (most is not None and plain > most):
        raise UsageError(f"{name}: {value} is out of range; it must be {_range(least, most)}")
    return plain


def flag(name: str, value: Any) -> bool:
    """Return True or False; NumPy's too, but nothing that merely looks like it."""
    if isinstance(value, bool) or (type(value).__name__ in ("bool", "bool_") and hasattr(value, "dtype")):
        return bool(value)
    raise UsageError(f"{name}: {value!r} is neither True nor False")


def choice(name: str, value: T, choices: Sequence[T]) -> T:
    """Return the value if it is one of the choices; the message names the nearest one."""
    for each in choices:
        if type(each) is type(value) and each == value:
            return value
    known = " or ".join(repr(each) for each in choices)
    raise UsageError(f"{name}: {value!r} is not {known}{nearest(value, choices)}")


def nearest(value: object, choices: Iterable[object]) -> str:
    """Return "; did you mean 'x'?" for the choice most like the value, or nothing."""
    import difflib  # late, as the command line's start waits for this module

    texts = {str(each).lower(): str(each) for each in choices}
    found = difflib.get_close_matches(str(value).lower(), list(texts), n=1)
    return f"; did you mean {texts[found[0]]!r}?" if found else ""


def path(name: str, value: Any) -> str:
    """Return the name of a file or folder as text, not yet absolute."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise UsageError(f"{name}: {value!r} is not a path")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise UsageError(f"{name}: {text!r} cannot be a file's name: {error.reason}") from error
    if b"\0" in encoded or not encoded:
        raise UsageError(f"{name}: {text!r} cannot be a file's name")
    return text


def function(name: str, value: Any) -> Callable[..., Any]:
    """Return a callable."""
    if not callable(value):
        raise UsageError(f"{name}: {value!r} cannot be called")
    checked: Callable[..., Any] = value
    return checked


def _range(least: float, most: float | None) -> str:
    return f"{least:,} or more" if most is None else f"from {least:,} to {most:,}"
