"""CSV and Parquet files batch by batch, through pyarrow, whose errors become messages with the file's name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


class CsvFile:
    """A CSV file; its types are settled by reading it once."""

    kind = "CSV"

    def __init__(self, path: str, options: TableOptions) -> None:
        load_pyarrow("CSV")
        self.path, self.label, self._options = path, shown(path), options
        self._types: dict[str, Any] = {}
        with arrow_errors(self.label):
            reader = self._open(None)
            self._all = list(reader.schema.names)
            self._types = {field.name: field.type for field in reader.schema}
            reader.close()
        self._check_header()
        self.names = [name for name in self._all if options.keeps(name)]
        self._types = {name: kind for name, kind in self._types.items() if name in set(self.names)}

    def schema(self) -> dict[str, Any]:
        """Return the columns' Arrow types as far as they are known."""
        return dict(self._types)

    def widen(self, name: str, wider: Any) -> None:
        """Read a column as another type from now on."""
        self._types[name] = wider

    def batches(self, names: Sequence[str] | None = None, start: int = 0) -> Iterator[Any]:
        """Yield record batches from row `start` on."""
        with arrow_errors(self.label):
            reader = self._open(names)
            try:
                for batch in reader:
                    if start >= batch.num_rows:
                        start -= batch.num_rows
                        continue
                    yield batch.slice(start)
                    start = 0
            finally:
                reader.close()

    def survey_batches(self) -> Iterator[Any]:
        """Yield all batches; where a column turns out to be wider than thought, begin anew with None.

        Raises:
            DataError: a column of numbers holds something else.
        """
        pyarrow = load_pyarrow("CSV")
        while True:
            rows = 0
            try:
                reader = self._open(self.names)
                for batch in reader:
                    yield batch
                    rows += batch.num_rows
                return
            except pyarrow.ArrowInvalid as error:
                found = _COLUMN.search(str(error))
                if found is None:
                    raise
                self._widen_from(self._all[int(found[1])], one_line(found[2], 200), rows)
                yield None

    def _widen_from(self, name: str, reason: str, rows: int) -> None:
        pyarrow = load_pyarrow("CSV")
        before = self._types[name]
        if pyarrow.types.is_null(before):
            self._types[name] = pyarrow.int64()
        elif pyarrow.types.is_int64(before):
            self._types[name] = pyarrow.float64()
        elif rows == 0 and pyarrow.types.is_floating(before):
            self._types[name] = pyarrow.string()  # nothing but gaps before: the first value is no number
        else:
            raise DataError(
                f"{self.label}: column {shown(name)} mixes types: it holds {_word(before)} first, and somewhere "
                "after row "
                f"{rows:,} something else ({reason}); mend it, leave the column out with drop, or read it as text "
                "with text"
            )

    def _open(self, names: Sequence[str] | None) -> Any:
        from pyarrow import csv

        pyarrow = load_pyarrow("CSV")
        delimiter = self._options.delimiter or ("\t" if self.path.lower().removesuffix(".gz").endswith(".tsv") else ",")
        types = dict(self._types)
        types.update((name, pyarrow.string()) for name in self._options.text)
        return csv.open_csv(
            self.path,
            read_options=csv.ReadOptions(block_size=_BLOCK_BYTES, autogenerate_column_names=not self._options.header),
            parse_options=csv.ParseOptions(delimiter=delimiter),
            convert_options=csv.ConvertOptions(column_types=types, include_columns=list(names) if names else None),
        )

    def _check_header(self) -> None:
        if len(set(self._all)) < len(self._all):
            twice = next(name for name in self._all if self._all.count(name) > 1)
            raise DataError(
                f"{self.label}: several columns are called {shown(twice)}; rename them, or pass header=False"
            )
        if self._options.header and self._all and all(_is_number(name) for name in self._all):
            raise DataError(
                f"{self.label}: the first row holds numbers ({shown(', '.join(self._all[:4]))}), no names; where it "
                "is data, "
                "pass header=False (--no-header)"
            )


class ParquetFile:
    """A Parquet file."""

    kind = "Parquet"

    def __init__(self, path: str, options: TableOptions) -> None:
        load_pyarrow("Parquet")
        self.path, self.label = path, shown(path)
        with arrow_errors(self.label), self._open() as file:
            names = list(file.schema_arrow.names)
            self.names = [name for name in names if options.keeps(name)]
            self._schema = {field.name: field.type for field in file.schema_arrow if field.name in set(self.names)}
            self.rows = file.metadata.num_rows
        if len(set(names)) < len(names):
            raise DataError(f"{self.label}: several columns have the same name; rename them")

    def schema(self) -> dict[str, Any]:
        """Return the columns' Arrow types."""
        return dict(self._schema)

    def batches(self, names: Sequence[str] | None = None, start: int = 0) -> Iterator[Any]:
        """Yield record batches from row `start` on."""
        with arrow_errors(self.label), self._open() as file:
            groups: list[int] = []
            rows = max(1, min(_BATCH_ROWS, _BATCH_VALUES // max(1, len(names or self.names))))
            for number in range(file.metadata.num_row_groups):
                length = file.metadata.row_group(number).num_rows
                if not groups and start >= length:
                    start -= length
                else:
                    groups.append(number)
            for group in groups:  # one by one: what is read ahead of several is kept in memory
                for batch in file.iter_batches(rows, row_groups=[group], columns=list(names) if names else None):
                    if start >= batch.num_rows:
                        start -= batch.num_rows
                        continue
                    yield batch.slice(start)
                    start = 0

    def survey_batches(self) -> Iterator[Any]:
        """Yield batches of the columns whose contents matter for their type."""
        pyarrow = load_pyarrow("Parquet")
        wanted = [name for name, kind in self._schema.items() if not pyarrow.types.is_floating(kind)]
        if wanted:
            yield from self.batches(wanted)

    def _open(self) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(
            self.path, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )


def _word(kind: Any) -> str:
    text = str(kind)
    return {"int64": "whole numbers", "double": "numbers", "string": "text", "bool": "true and false"}.get(text, text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
