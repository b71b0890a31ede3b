"""How long work with data says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what goes on, how many rows or steps are done, and of how many."""


def tell_nobody(what: str, done: int, total: int) -> None:
    """Take it that nobody asks."""
