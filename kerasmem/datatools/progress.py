"""Callbacks that report progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the step, the rows done and all rows."""


def tell_nobody(what: str, done: int, total: int) -> None:
    """Report no progress."""
