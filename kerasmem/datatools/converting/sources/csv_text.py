"""What the text of a CSV file says before it is parsed: its separators, how many columns, and what types would hide."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from kerasmem.datatools.converting.settings import ReadOptions
from kerasmem.errors import DataError
from kerasmem.units import MIB

MOST_COLUMNS = 1 << 16  # of a table: the libraries that read one take some 10 kB for each column
BLOCK_BYTES = 4 * MIB  # of CSV parsed at a time; a row has to fit in
NOT_UTF8 = (
    "it is not UTF-8; say what it was written in with encoding, such as encoding='latin-1' (--encoding latin-1), or "
    "save it as UTF-8"
)
_HEAD_BYTES, _HEAD_LINES = 1 << 16, 200
_QUOTED = re.compile(r'"[^"]*"')
_POINT = re.compile(r'(?:^|;)\s*"?[-+]?\d*\.\d')
_COMMA = re.compile(r'(?:^|;)\s*"?[-+]?\d*,\d+"?\s*(?=;|$)')


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written.

    Args:
        delimiter: between values.
        decimal: before the fraction of a number.
    """

    delimiter: str
    decimal: str = "."


def read_dialect(path: str, label: str, options: ReadOptions) -> Dialect:
    """Return how a file is written, by what is asked for and by its first lines.

    Raises:
        DataError: it has far too many columns.
    """
    has_tabs = path.lower().removesuffix(".gz").endswith(".tsv")
    with _opened(path) as file:
        first, more = (_text(part, options.encoding) for part in (file.readline(BLOCK_BYTES), file.read(_HEAD_BYTES)))
    bare = _QUOTED.sub("", first)
    guess = "\t" if has_tabs else ";" if ";" in bare and "," not in bare else ","
    delimiter = options.delimiter or guess
    if bare.count(delimiter) >= MOST_COLUMNS:
        raise DataError(too_many_columns(label, bare.count(delimiter) + 1))
    rows = [*([] if options.header else [first.rstrip("\r\n")]), *more.splitlines()[:_HEAD_LINES]]
    has_commas = delimiter == ";" and any(map(_COMMA.search, rows)) and not any(map(_POINT.search, rows))
    return Dialect(delimiter, "," if has_commas else ".")


def too_many_columns(label: str, count: int) -> str:
    """Return why a table is not read."""
    return (
        f"{label}: has {count:,} columns, and {MOST_COLUMNS:,} are read; save the numbers as one array, with np.save, "
        "or turn the table on its side"
    )


def has_leading_zeros(path: str, delimiter: str) -> bool:
    """Return whether any value of the file may begin with a zero and another digit."""
    found = [re.compile(re.escape(before) + b"0[0-9]") for before in (delimiter.encode(), b"\n", b'"')]
    return any(each.search(block) for block in _blocks(path, overlap=3) for each in found)


def quotes_match(path: str) -> bool:
    """Return whether the file has an even number of quotes, as one has in which each that opens is closed."""
    return sum(block.count(b'"') for block in _blocks(path)) % 2 == 0


def _blocks(path: str, overlap: int = 0) -> Iterator[bytes]:
    with _opened(path) as file:
        tail = b"\n" if overlap else b""
        while block := file.read(BLOCK_BYTES):
            yield tail + block
            tail = block[-overlap:] if overlap else b""


def _opened(path: str) -> IO[bytes]:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _text(line: bytes, encoding: str) -> str:
    return line.decode(encoding, "replace").removeprefix("\ufeff")
