"""What one line of a text says, and the rules that read it: each family of messages registers its own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MOST = 2**62  # no size, dimension or count beyond this is taken for one
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
WIDTHS = {
    "float": 4, "float32": 4, "f32": 4, "int32": 4, "uint32": 4, "s32": 4, "u32": 4, "qint32": 4,
    "double": 8, "float64": 8, "f64": 8, "int64": 8, "uint64": 8, "s64": 8, "u64": 8, "complex64": 8, "c64": 8,
    "half": 2, "float16": 2, "f16": 2, "bfloat16": 2, "bf16": 2, "int16": 2, "uint16": 2, "s16": 2, "u16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "s8": 1, "u8": 1, "pred": 1, "|u1": 1, "complex128": 16, "c128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What a line says.

    Attributes:
        kind: "failure" (memory ran out), "weak" (a death that is most often that), "detail" (of a failure beside it),
            "ahead" (of a failure that follows), "cancel" (the failure just before was none) or "other" (something that
            is not out of memory).
        family: as in `Diagnosis.family`.
        what: an identifier within the family, for the sentence and the remedies.
        facts: any of the fields of a `Diagnosis` in bytes and counts, and "processes", "pool", "free_piece", "note".
    """

    kind: str
    family: str
    what: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """How to read a line.

    Attributes:
        needle: a piece of text that every such line holds; looked for first, as it costs nothing.
        pattern: searched in the line; must not backtrack without bound.
        read: the finding, or None when it is no such line after all.
    """

    needle: str
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], Finding | None]


def rule(needle: str, pattern: str, kind: str, family: str, what: str = "", **facts: Any) -> Rule:
    """Return a rule that takes the named groups of its pattern as facts, beside those given.

    `sized`, `counted`, `kilobytes` and `shaped` make such groups; any other `(?P<name>…)` is taken as text.
    """
    return Rule(needle, re.compile(pattern), lambda match: Finding(kind, family, what, facts | named_facts(match)))


def reader(needle: str, pattern: str) -> Callable[[Callable[[re.Match[str]], Finding | None]], Rule]:
    """Return a decorator that makes a rule of a function that reads a match."""
    return lambda read: Rule(needle, re.compile(pattern), read)


def sized(name: str) -> str:
    """Return a group for a size with its unit: "1.5GiB"."""
    return rf"(?P<{name}__size>\d{{1,20}}(?:\.\d{{1,6}})?) ?(?P<{name}__unit>[kKMGTP]?i?[bB]?(?:ytes)?)\b"


def counted(name: str) -> str:
    """Return a group for bytes without a unit; where a pattern has both forms of a size, this one counts."""
    return rf"(?P<{name}__count>\d{{1,20}})"


def kilobytes(name: str) -> str:
    """Return a group for a number of kilobytes, without their unit."""
    return rf"(?P<{name}__kilobytes>\d{{1,18}})"


def shaped(name: str, least: int = 1) -> str:
    """Return a group for the sizes of a tensor, of at least so many characters: "64,112,112,64"."""
    return rf"(?P<{name}__shape>[\d, ]{{{least},200}})"


def named_facts(match: re.Match[str]) -> dict[str, Any]:
    """Return what the named groups of a match say; what is not there is left out."""
    facts = {}
    for group, text in match.groupdict().items():
        name, _, form = group.partition("__")
        if text is not None and form != "unit":
            facts[name] = {
                "size": lambda text, name: size(text, match[f"{name}__unit"]),
                "count": lambda text, _: size(text),
                "kilobytes": lambda text, _: size(text, "k"),
                "shape": lambda text, _: shape(text),
                "": lambda text, _: text,
            }[form](text, name)
    return facts


def size(number: str | None, unit: str | None = "") -> int | None:
    """Return bytes from a number and a unit: powers of 1024, as every allocator means them; None beyond reason.

    Example:
        >>> size("1.5", "GiB")
        1610612736
    """
    if number is None:
        return None
    letter = (unit or "").lower().removesuffix("ytes")
    factor = _UNITS.get(letter[:1] if letter[:1] != "b" else "")
    try:
        value = int(number) * factor if number.isdigit() and factor else round(float(number) * (factor or 1))
    except (ValueError, OverflowError):
        return None
    return value if 0 <= value <= MOST else None


def shape(text: str | None) -> tuple[int, ...] | None:
    """Return the sizes in "64,112,112,64", at most 16 of them; None where it is no shape."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not parts or len(parts) > 16 or not all(part.isdecimal() and len(part) < 19 for part in parts):
        return None
    return tuple(int(part) for part in parts)


def tensor_bytes(sizes: tuple[int, ...] | None, dtype: str | None) -> int | None:
    """Return what a tensor takes, None where the type is not known or the size beyond reason."""
    width = WIDTHS.get((dtype or "").lower().removesuffix("_ref"))
    if sizes is None or width is None:
        return None
    total = math.prod(sizes) * width
    return total if total <= MOST else None
