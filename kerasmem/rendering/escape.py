"""Text from model and data files is untrusted: nothing of it may steer a terminal, a table or a spreadsheet."""

from __future__ import annotations

import unicodedata

# control, format (also bidirectional overrides), surrogate, private use, line and paragraph separators
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def printable(text: str, limit: int | None = None) -> str:
    r"""Return `text` with every invisible or control character written as an escape, cut to `limit`.

    Example:
        >>> printable("conv\x1b[31m")
        'conv\\x1b[31m'
    """
    shown = "".join(
        character.encode("unicode_escape").decode("ascii") if unicodedata.category(character) in _HIDDEN else character
        for character in text
    )
    if limit is not None and len(shown) > limit:
        shown = shown[: max(limit - 1, 1)] + "…"
    return shown


def spreadsheet_cell(text: str) -> str:
    """Return `text` for a CSV cell: printable, and never taken for a formula by a spreadsheet."""
    shown = printable(text)
    return "'" + shown if shown[:1] in ("=", "+", "-", "@") else shown


def middle(value: str, limit: int) -> str:
    """Return text with its middle left out where it is longer than `limit`: the ends tell layers apart.

    Example:
        >>> middle("encoder/block_07/attention/query", 17)
        'encoder/…on/query'
    """
    if len(value) <= limit:
        return value
    head = (limit - 1) // 2
    return f"{value[:head]}…{value[-(limit - 1 - head) :]}"
