"""Sizes in bytes, counts and printable text: read from users and shown to them."""

from __future__ import annotations

import re
import unicodedata
from numbers import Integral
from typing import Any

from kerasmem.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:[_,]\d{3})*(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*\Z", re.ASCII)

# Unicode's control, format (such as bidirectional overrides), surrogate, private use and separator characters
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def is_size(text: str) -> bool:
    """Return whether a text is a size, such as "16GB"."""
    match = _SIZE.match(text)
    return match is not None and match[2].lower() in _FACTORS


def parse_size(value: int | str, *, field: str = "size") -> int:
    """Read a size in bytes from an integer or a text such as "512MB" or "16GiB".

    `kB`, `MB`, `GB` and `TB` are powers of 1000. `KiB`, `MiB`, `GiB`, `TiB`, and `K`, `M`, `G`, `T` as in Slurm and
    ulimit, are powers of 1024. Case does not matter.

    Args:
        value: bytes, or a text with a unit.
        field: the setting's name in the error message.

    Raises:
        UsageError: If the value is not a size, or is negative.

    Examples:
        >>> parse_size("1.5GiB")
        1610612736
    """
    plain: Any = value  # may be NumPy's
    if not isinstance(plain, bool) and isinstance(plain, Integral) and int(plain) >= 0:
        return int(plain)
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _FACTORS:
        raise UsageError(f"{field} must be a size such as '512MB' or '16GiB', or a number of bytes; got {value!r}")
    number = match[1].replace("_", "").replace(",", "")
    factor = _FACTORS[match[2].lower()]
    return int(number) * factor if number.isdigit() else int(float(number) * factor)


def format_size(count: int | None) -> str:
    """Format bytes in a binary unit with three significant digits, or an unknown size (None) as "?".

    Examples:
        >>> format_size(8_895_568)
        '8.48 MiB'
    """
    if count is None:
        return "?"
    if abs(count) < KIB:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):  # noqa: B007
        value /= 1024
        if abs(value) < 999.5:
            break
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_count(count: int | None, noun: str = "") -> str:
    """Format a count with thousands separators and an optional noun, or an unknown count (None) as "?".

    Examples:
        >>> format_count(1_111_946), format_count(2, "batch"), format_count(1, "row")
        ('1,111,946', '2 batches', '1 row')
    """
    text = "?" if count is None else f"{count:,}"
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{text} {noun}{plural}" if noun else text


def printable(text: str, limit: int | None = None) -> str:
    r"""Escape invisible and control characters, and shorten the text to `limit` characters.

    Examples:
        >>> printable("conv\x1b[31m")
        'conv\\x1b[31m'
    """
    escaped = "".join(
        character.encode("unicode_escape").decode("ascii") if unicodedata.category(character) in _HIDDEN else character
        for character in text
    )
    return escaped if limit is None or len(escaped) <= limit else escaped[: max(limit - 1, 1)] + "…"
