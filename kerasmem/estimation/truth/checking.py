"""Is this a file of rows of the data set? Every line against the fields in `data/truth.json`; nothing is trusted."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

from kerasmem import checks
from kerasmem.errors import InputError
from kerasmem.estimation.truth.results import CheckedRows, Problem
from kerasmem.estimation.truth.rows import Finding, Row, StoredRow, distribution, findings, measured
from kerasmem.files import package_data, read_json
from kerasmem.units import printable

MOST_BYTES_A_LINE = 2**20
MOST_PROBLEMS = 50  # that are told one by one
_MOST_LETTERS = 400
_PATH = re.compile(r"(?:^|[\s'\"(=:])(?:~|/[\w.+-]+)/[\w.+-]|\b[A-Za-z]:\\|\\\\\w")
_TYPES: dict[str, tuple[type, ...]] = {"text": (str,), "whole": (int,), "number": (int, float), "flag": (bool,)}
_WORDS = {"text": "a text", "whole": "a whole number", "number": "a number", "flag": "true or false"}
_NAME = re.compile(r"[a-z][a-z_-]*")
_FIX = "the fields stand in docs/dataset.md"


@dataclass(frozen=True)
class Field:
    """What a value of a row must be.

    Attributes:
        path: of the value: "truth.runs[].peak_bytes[]"; `*` stands for one of `keys`.
        type: "text", "whole", "number" or "flag".
        what: it means.
        unit: of a number.
        least, most: of a number.
        choices: of a text.
        null: whether it may be null.
        required: whether every row has it.
    """

    path: str
    type: str
    what: str
    unit: str | None = None
    least: int = 0
    most: int | None = None
    choices: tuple[str, ...] = ()
    null: bool = False
    required: bool = False


@functools.cache
def fields() -> dict[str, Field]:
    """Return path → field, in the order in which the manual lists them."""
    rows = package_data("kerasmem.estimation", "truth")["fields"]
    return {row["path"]: Field(**{**row, "choices": tuple(row.get("choices", ()))}) for row in rows}


@functools.cache
def _containers() -> dict[str, type]:
    """Return the paths of a row's objects and lists."""
    found: dict[str, type] = {}
    for path in fields():
        for end, sign in enumerate(path):
            if sign in ".[":
                found[path[:end]] = dict if sign == "." else list
    return found


def check_rows(path: str) -> CheckedRows:
    """Look at every line of a file of rows.

    Args:
        path: of the file; one JSON object a line.

    Raises:
        UsageError: the path is none.
        InputError: the file cannot be read.

    Examples:
        >>> check_rows("rows.jsonl").is_valid  # doctest: +SKIP
        True
    """
    name = checks.path("file", path)
    problems: list[Problem] = []
    found: list[Finding] = []
    first: dict[str, int] = {}
    networks: set[str] = set()
    count = known = 0
    try:
        with open(name, "rb") as file:
            for number, line in enumerate(_lines(file), 1):
                row, faults = _checked(number, line)
                if not faults and (before := first.setdefault(row["key"], number)) != number:
                    faults = [_again(number, before)]
                count += len(faults)
                problems += faults[: MOST_PROBLEMS - len(problems)]
                if not faults:
                    networks.add(row["model"])
                    known += measured(row) is not None
                    found += findings(row)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from error
    if not count and not first:
        problems, count = [Problem(1, "", "the file has no row", "kerasmem bench contribute writes one")], 1
    return CheckedRows(len(first), len(networks), known, tuple(problems), count - len(problems), distribution(found))


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for one that is too long, which is not kept."""
    while line := file.readline(MOST_BYTES_A_LINE + 1):
        if len(line) <= MOST_BYTES_A_LINE or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MOST_BYTES_A_LINE)
        yield None


def _checked(number: int, line: bytes | None) -> tuple[StoredRow, list[Problem]]:
    """Return the row of a line, and what is wrong with it; the row is whole where nothing is."""
    if line is None:
        way = "a row has some thousand; leave the line out"
        return {}, [Problem(number, "", f"longer than {MOST_BYTES_A_LINE:,} bytes", way)]
    try:
        row = read_json(line.decode())
    except ValueError as error:  # UnicodeDecodeError is one
        return {}, [Problem(number, "", f"no JSON: {error!s:.80}", "write one JSON object a line, in UTF-8")]
    if not isinstance(row, dict):
        return {}, [Problem(number, "", f"{_kind(row)} in place of an object", "write one JSON object a line")]
    found = [Problem(number, *each) for each in islice(_faults(row), MOST_PROBLEMS)]
    return row, found or [Problem(number, *each) for each in _relations(row)]


def _faults(row: StoredRow) -> Iterator[tuple[str, str, str]]:
    """Yield field, what is wrong and the way out for each value that its field does not allow, and what is missing."""
    seen: set[str] = set()
    for place, path, value in _values(row):
        seen.add(path)
        field, kind = fields().get(path), _containers().get(path)
        if kind is not None:
            yield place, f"{_kind(value)} in place of {_kind(kind())}", f"write {_kind(kind())}; {_FIX}"
        elif field is None:
            near = checks.nearest(path[:80], fields())
            yield place, "no field of a row", f"take it out{near}" if near else f"take it out; {_FIX}"
        elif (wrong := _wrong(field, value)) is not None:
            yield place, *wrong
    for field in fields().values():
        if field.required and field.path not in seen:
            yield field.path, "missing", f"add it: {field.what}"


def _values(value: Any, place: str = "", path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield where each value stands, its field's path, and the value; an object or a list only where none belongs."""
    keys: Mapping[str, list[str]] = package_data("kerasmem.estimation", "truth")["keys"]
    if path and (not isinstance(value, (dict, list)) or _containers().get(path) is not type(value)):
        yield printable(place, 80), path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            known = name if _NAME.fullmatch(name) else "?"
            step, dot = "*" if name in keys.get(path, ()) else known, "." if path else ""
            yield from _values(inner, f"{place}{dot}{name}", f"{path}{dot}{step}")
    else:
        for number, inner in enumerate(value):
            yield from _values(inner, f"{place}[{number}]", f"{path}[]")


def _wrong(field: Field, value: Any) -> tuple[str, str] | None:
    """Return what is wrong with a value and the way out."""
    if value is None:
        return None if field.null else ("null", f"write {_WORDS[field.type]}, or leave the field out")
    if isinstance(value, bool) != (field.type == "flag") or not isinstance(value, _TYPES[field.type]):
        wanted = _WORDS[field.type]
        return f"{_kind(value)} {value!r:.40} in place of {wanted}", f"write {wanted}: {field.what}"
    if isinstance(value, str):
        return _wrong_text(field, value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} is no figure", "leave the field out where it is not known"
        if value < field.least or (field.most is not None and value > field.most):
            most = "" if field.most is None else f" to {field.most:,}"
            return (
                f"{value!r:.40} is out of range",
                f"write a number from {field.least:,}{most} ({field.unit or 'count'})",
            )
    return None


def _wrong_text(field: Field, value: str) -> tuple[str, str] | None:
    if field.choices and value not in field.choices:
        return f"{value!r:.60} is none of its words", f"write one of {', '.join(field.choices)}"
    if not value.isprintable():
        return f"{value!r:.60} has control characters", "write plain text in one line"
    if len(value) > _MOST_LETTERS:
        return f"{len(value):,} letters", f"write {_MOST_LETTERS} at most"
    if _PATH.search(value):
        return f"{value!r:.60} names a folder of a machine", "take the path out"
    return None


def _relations(row: StoredRow) -> Iterator[tuple[str, str, str]]:
    """Yield what single fields do not tell: the key, an interval that leaves its total out, a row without figures."""
    named = {name: row[name] for name in Row.__dataclass_fields__ if name in row}
    key = Row(**named).key
    if row["key"] != key:
        yield "key", f"{row['key']!r:.80} is not the name of this row", f"write {key}"
    truth = row.get("truth", {})
    runs = truth.get("runs", [])
    if "truth" in row and not truth.get("error") and not runs:
        yield "truth", "neither a run nor an error", "leave it out, or say why nothing was measured"
    if any(not run.get("peak_bytes") for run in runs):
        yield "truth.runs[].peak_bytes", "a run without a peak", "leave the run out"
    for method, answer in row.get("estimates", {}).items():
        total = answer.get("total")
        ends = [end for end in (answer.get("low"), total, answer.get("high")) if end is not None]
        if total is None and not answer.get("error"):
            yield f"estimates.{method}", "neither a total nor an error", "leave the estimate out"
        elif ends != sorted(ends):
            yield f"estimates.{method}", "low, total and high are not in this order", "write what the estimate said"


def _again(number: int, before: int) -> Problem:
    way = "keep one of them; rows of another machine or other versions go into a file of their own"
    return Problem(number, "key", f"the row of line {before:,} again", way)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "the text", bool: "the word", type(None): "null"}
    return names.get(type(value), "the number")
