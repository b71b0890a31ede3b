"""CSV and Parquet files batch by batch, through pyarrow, whose errors become messages with the file's name."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kerasmem.errors import DataError, MissingExtraError
from kerasmem.hdf5.layout import one_line, shown
from kerasmem.units import MIB

_BLOCK_BYTES = 4 * MIB  # of CSV parsed at a time; a row has to fit in
_BATCH_ROWS = 1 << 16
_BATCH_VALUES = 1 << 19  # of a table with many columns, read at a time
_BUFFER_BYTES = 1 << 16  # read from the file at a time, a column each
_COLUMN = re.compile(r"In CSV column #(\d+): (.*)", re.DOTALL)


@dataclass(frozen=True)
class TableOptions:
    """How CSV files are read.

    Args:
        header: whether the first row names the columns.
        delimiter: between values; None for a comma, in .tsv a tab.
        text: columns that are texts even where they look like numbers.
        keeps: says of a column's name whether it is wanted; the others are not looked at.
    """

    header: bool = True
    delimiter: str | None = None
    text: tuple[str, ...] = ()
    keeps: Callable[[str], bool] = lambda _: True


def load_pyarrow(what: str) -> Any:
    """Return pyarrow.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingExtraError(f"reading {what} files", "convert") from None
    return pyarrow


@contextlib.contextmanager
def arrow_errors(label: str) -> Iterator[None]:
    """Turn what pyarrow raises into a `DataError`."""
    pyarrow = load_pyarrow("table")
    try:
        yield
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, UnicodeError, KeyError, IndexError, OverflowError) as error:
        raise DataError(f"{label}: cannot be read: {_reason(str(error))}") from error


def _reason(text: str) -> str:
    text = one_line(text, 400)
    if "Expected" in text and "columns, got" in text:
        return (
            f"{text}; every row needs as many values as the first; mend the row, or name the separator with delimiter"
        )
    if "straddling object" in text or "block_size" in text:
        return f"a row is longer than {_BLOCK_BYTES:,} bytes, or a quote is never closed ({text})"
    if "Empty CSV" in text:
        return "the file is empty"
    return text


class TableFile(ABC):
    """A file of columns.

    Args:
        path: the file.
        options: how it is read.

    Attributes:
        types: the Arrow types of the columns that are wanted, by name.
    """

    kind: ClassVar[str]
    types: dict[str, Any]

    def __init__(self, path: str, options: TableOptions) -> None:
        self.path, self.label, self.options = path, shown(path), options
        self.pyarrow = load_pyarrow(self.kind)

    def batches(self, names: Sequence[str] = (), start: int = 0) -> Iterator[Any]:
        """Yield record batches of some columns, or of all, from row `start` on."""
        with arrow_errors(self.label):
            for first, batch in self._batches(list(names), start):
                if first + batch.num_rows > start:
                    yield batch.slice(max(0, start - first))

    @abstractmethod
    def survey_batches(self) -> Iterator[Any]:
        """Yield all batches of the columns whose contents matter for their type; None to begin again."""

    @abstractmethod
    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        """Yield record batches and the number of their first row; those before `start` may be left out."""


class CsvFile(TableFile):
    """A CSV file; its types are settled by reading it once."""

    kind = "CSV"

    def __init__(self, path: str, options: TableOptions) -> None:
        super().__init__(path, options)
        self.types = {}
        with arrow_errors(self.label), self._open(None) as reader:
            found = {field.name: field.type for field in reader.schema}
            self._all = list(reader.schema.names)
        self._check_header()
        self.types = {name: kind for name, kind in found.items() if options.keeps(name)}

    def survey_batches(self) -> Iterator[Any]:
        """Yield all batches; where a column turns out to be wider than thought, begin again with None.

        Raises:
            DataError: a column of numbers holds something else.
        """
        while True:
            rows = 0
            try:
                for first, batch in self._batches(list(self.types), 0):
                    yield batch
                    rows = first + batch.num_rows
                return
            except self.pyarrow.ArrowInvalid as error:
                found = _COLUMN.search(str(error))
                if found is None:
                    raise
                self._widen(self._all[int(found[1])], one_line(found[2], 200), rows)
                yield None

    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        first = 0
        with self._open(names or None) as reader:
            for batch in reader:
                yield first, batch
                first += batch.num_rows

    def _widen(self, name: str, reason: str, rows: int) -> None:
        pyarrow = self.pyarrow
        before = self.types[name]
        if pyarrow.types.is_null(before):
            self.types[name] = pyarrow.int64()
        elif pyarrow.types.is_int64(before):
            self.types[name] = pyarrow.float64()
        elif rows == 0 and pyarrow.types.is_floating(before):
            self.types[name] = pyarrow.string()  # nothing but gaps before: the first value is no number
        else:
            raise DataError(
                f"{self.label}: column {shown(name)} mixes types: it holds {_word(before)} first, and somewhere after "
                f"row {rows:,} something else ({reason}); mend it, leave the column out with drop, or read it as text "
                "with text"
            )

    def _open(self, names: list[str] | None) -> Any:
        from pyarrow import csv

        delimiter = self.options.delimiter or ("\t" if self.path.lower().removesuffix(".gz").endswith(".tsv") else ",")
        types = {**self.types, **dict.fromkeys(self.options.text, self.pyarrow.string())}
        return csv.open_csv(
            self.path,
            read_options=csv.ReadOptions(block_size=_BLOCK_BYTES, autogenerate_column_names=not self.options.header),
            parse_options=csv.ParseOptions(delimiter=delimiter),
            convert_options=csv.ConvertOptions(column_types=types, include_columns=names),
        )

    def _check_header(self) -> None:
        if len(set(self._all)) < len(self._all):
            twice = next(name for name in self._all if self._all.count(name) > 1)
            raise DataError(
                f"{self.label}: several columns are called {shown(twice)}; rename them, or pass header=False"
            )
        if self.options.header and self._all and all(is_number(name) for name in self._all):
            raise DataError(
                f"{self.label}: the first row holds numbers ({shown(', '.join(self._all[:4]))}), no names; where it "
                "is data, pass header=False (--no-header)"
            )


class ParquetFile(TableFile):
    """A Parquet file."""

    kind = "Parquet"

    def __init__(self, path: str, options: TableOptions) -> None:
        super().__init__(path, options)
        with arrow_errors(self.label), self._open() as file:
            names = list(file.schema_arrow.names)
            self.types = {field.name: field.type for field in file.schema_arrow if options.keeps(field.name)}
            self.rows = file.metadata.num_rows
        if len(set(names)) < len(names):
            raise DataError(f"{self.label}: several columns have the same name; rename them")

    def survey_batches(self) -> Iterator[Any]:
        """Yield batches of all columns but those of floating-point numbers."""
        wanted = [name for name, kind in self.types.items() if not self.pyarrow.types.is_floating(kind)]
        if wanted:
            yield from self.batches(wanted)

    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        rows = max(1, min(_BATCH_ROWS, _BATCH_VALUES // max(1, len(names or self.types))))
        first = 0
        with self._open() as file:
            for group in range(file.metadata.num_row_groups):
                length = file.metadata.row_group(group).num_rows
                if first + length <= start:
                    first += length
                    continue
                # one group at a time: what is read ahead of several is kept in memory
                for batch in file.iter_batches(rows, row_groups=[group], columns=names or None):
                    yield first, batch
                    first += batch.num_rows

    def _open(self) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(
            self.path, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )


def _word(kind: Any) -> str:
    text = str(kind)
    return {"int64": "whole numbers", "double": "numbers", "string": "text", "bool": "true and false"}.get(text, text)


def is_number(text: str) -> bool:
    """Return whether a text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
