"""CSV and Parquet files, batch by batch, as pyarrow reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kerasmem.datatools.converting.settings import ReadOptions
from kerasmem.datatools.converting.sources.csv_text import (
    BLOCK_BYTES,
    MOST_COLUMNS,
    NOT_UTF8,
    has_leading_zeros,
    quotes_match,
    read_dialect,
    too_many_columns,
)
from kerasmem.datatools.converting.sources.tables import MIXED, Column, TableSource, agree, arrow_errors, is_number
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import one_line, shown

_BATCH_ROWS = 1 << 16
_BATCH_VALUES = 1 << 19  # of a table with many columns, read at a time
_BUFFER_BYTES = 1 << 16  # read from the file at a time, a column each
_NUMBER = re.compile(r"In CSV column #(\d+): (.*)", re.DOTALL)
_WORDS = {"int64": "whole numbers", "double": "numbers", "string": "text", "bool": "true and false"}
_CODE, _WHOLE = "^0[0-9]+$", "^[-+]?[0-9]{19,}$"


def open_tables(paths: Sequence[str], options: ReadOptions) -> list[TableSource]:
    """Return a source a file, those with the same columns agreed on their types.

    Raises:
        DataError: a file cannot be read, or its columns cannot be made numbers.
    """
    opened: list[TableSource] = []
    for path in paths:
        kind = ParquetSource if path.lower().endswith((".parquet", ".pq")) else CsvSource
        opened.append(kind(path, options))
    tables = [source for source in opened if isinstance(source, CsvSource)]
    codes = {name: example for source in tables for name, example in source.codes.items()}
    for source in tables:
        source.keep_codes(codes)
    groups: dict[frozenset[str], list[TableSource]] = {}
    for each in opened:
        groups.setdefault(frozenset(each.columns), []).append(each)
    for group in groups.values():
        agree(group, options.text)
    told: set[str] = set()
    for source in tables:  # what is true of many files is said once
        source.notes = [note for note in source.notes if note not in told]
        told.update(source.notes)
    return [source for group in groups.values() for source in group]


class CsvSource(TableSource):
    """A CSV file; its types are settled by reading it once.

    Attributes:
        codes: columns of numbers that begin with zeros, which are read as texts, and an example of each.
    """

    format = "CSV"
    starts = (0,)
    codes: dict[str, str]

    def settle(self, columns: dict[str, Column]) -> None:
        """Take over the types that all files agree on, as which the columns are read from now on."""
        super().settle(columns)
        arrow = self.arrow
        types = {"int": arrow.int64(), "float": arrow.float64(), "text": arrow.string(), "bool": arrow.bool_()}
        self.types = {name: types[column.kind] for name, column in columns.items()}

    def keep_codes(self, codes: Mapping[str, str]) -> None:
        """Read columns of whole numbers as texts that have codes in another file; `codes` has an example of each."""
        self.codes = {name: code for name, code in codes.items() if name in self.types and self._is_whole(name)}
        if self.codes:
            self.types |= dict.fromkeys(self.codes, self.arrow.string())
            with arrow_errors(self.label):
                self.columns = self._survey()

    def _is_whole(self, name: str) -> bool:
        return bool(self.arrow.types.is_int64(self.types[name]))

    def _open(self) -> None:
        self.types, self.codes = {}, {}
        self._ends_within: set[str] = set()
        self._large: set[str] = set()
        self._dialect = read_dialect(self.paths[0], self.label, self.options)
        with self._reader(None) as reader:
            self._all, kinds = list(reader.schema.names), list(reader.schema.types)
        twice = [name for name, count in Counter(self._all).items() if count > 1]
        if twice:
            raise DataError(
                f"{self.label}: several columns are called {shown(twice[0])}; rename them, or pass header=False"
            )
        if self.options.header and self._all and all(is_number(name) for name in self._all):
            raise DataError(
                f"{self.label}: the first row holds numbers ({shown(', '.join(self._all[:4]))}), no names; where it "
                "is data, pass header=False (--no-header)"
            )
        self.types = {
            name: kind for name, kind in zip(self._all, kinds, strict=True) if self.options.columns.reads(name)
        }
        for name, kind in self.types.items():
            if self.arrow.types.is_binary(kind):
                raise DataError(f"{self.label}: column {shown(name)} holds the type binary: {NOT_UTF8}")
        if self._dialect.decimal == ",":
            self.notes.append("numbers are read with decimal commas")
        whole = [name for name in self.types if self._is_whole(name) and name not in self.options.text]
        if whole and has_leading_zeros(self.paths[0], self._dialect.delimiter):
            self.codes = self._first_texts(whole, _CODE)
            for name in [name for name in self.codes if self.options.columns.joins(name)]:
                self._lose_zeros(name, "beside other columns it is a number")
            self.types |= dict.fromkeys(self.codes, self.arrow.string())

    def _first_texts(self, names: list[str], pattern: str) -> dict[str, str]:
        """Return the first text in each column that a pattern fits, whatever the column's type."""
        found: dict[str, str] = {}
        with self._reader(names, dict.fromkeys(names, self.arrow.string())) as reader:
            for batch in reader:
                for name, values in zip(batch.schema.names, batch.columns, strict=True):
                    fitting = values.filter(self.arrow.compute.match_substring_regex(values, pattern))
                    if len(fitting):
                        found.setdefault(name, fitting[0].as_py())
        return found

    def _survey(self) -> dict[str, Column]:
        """Look through the file, from the beginning again where a column turns out to be wider than thought."""
        while True:
            self.rows, self._ends_within, self._large = 0, set(), set()
            try:
                found = super()._survey()
            except self.arrow.ArrowInvalid as error:
                number = _NUMBER.search(str(error))
                if number is None:
                    raise
                self._widen(self._all[int(number[1])], one_line(number[2], 200))
                continue
            lost = [name for name in self.codes if found[name].kind in ("prose", "mixed")]
            for name in lost:
                self._lose_zeros(name, "it has too many for classes of texts")
            if not lost:
                self._tell()
                return found

    def _lose_zeros(self, name: str, why: str) -> None:
        """Have a column read as numbers although they begin with zeros."""
        self.types[name] = self.arrow.int64()
        code = shown(self.codes.pop(name), 40)
        self.notes.append(f"{shown(name)} loses the zeros that its numbers begin with ({code}): {why}")

    def _tell(self) -> None:
        """Refuse or note what is not read as it stands in the file."""
        if self._ends_within and not quotes_match(self.paths[0]):
            raise DataError(
                f"{self.label}: a quote is never closed: {shown(min(self._ends_within))} of the last row goes on to "
                "the end of the file; close it"
            )
        for name, code in self.codes.items():
            self.notes.append(
                f"{shown(name)} has codes that begin with zeros ({shown(code, 40)}), and is written as classes of its "
                "texts"
            )
        for name, number in self._first_texts(sorted(self._large), _WHOLE).items() if self._large else ():
            self.notes.append(
                f"{shown(name)} has whole numbers beyond int64 ({shown(number, 40)}), which are rounded; where they "
                "tell rows apart, read it as text with text (--text)"
            )

    def _add(self, name: str, values: Any, column: Column) -> None:
        super()._add(name, values, column)
        if not len(values):
            return
        if column.kind == "float":
            limits = self.arrow.compute.min_max(values).as_py()
            if any(abs(limit or 0) >= 2**63 for limit in limits.values()):
                self._large.add(name)
        elif self.arrow.types.is_string(values.type):
            within = "\n" in (values[len(values) - 1].as_py() or "")
            (self._ends_within.add if within else self._ends_within.discard)(name)

    def _widen(self, name: str, reason: str) -> None:
        arrow, before = self.arrow, self.types[name]
        if arrow.types.is_null(before):
            self.types[name] = arrow.int64()
        elif arrow.types.is_int64(before):
            self.types[name] = arrow.float64()
        elif self.rows == 0 and arrow.types.is_floating(before):
            self.types[name] = arrow.string()  # nothing but gaps before: the first value is no number
        elif "UTF8" in reason:
            raise DataError(f"{self.label}: column {shown(name)} cannot be read after row {self.rows:,}: {NOT_UTF8}")
        else:
            self.types[name] = arrow.string()
            unlike = self.first_unlike(name)
            place = f"after row {self.rows:,} something else ({reason})"
            if unlike is not None:
                place = f"first in row {unlike[0]:,}, counted from 0, {shown(unlike[1], 40)}"
            word = _WORDS.get(str(before), str(before))
            raise DataError(
                f"{self.label}: column {shown(name)} mixes types: it holds {word} first, and {place}; {MIXED}"
            )

    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        first = 0
        with self._reader(names) as reader:
            for batch in reader:
                yield first, batch
                first += batch.num_rows

    def _reader(self, names: list[str] | None, types: Mapping[str, Any] | None = None) -> Any:
        from pyarrow import csv

        known = {**self.types, **dict.fromkeys(self.options.text, self.arrow.string()), **(types or {})}
        return csv.open_csv(
            self.paths[0],
            read_options=csv.ReadOptions(
                block_size=BLOCK_BYTES,
                autogenerate_column_names=not self.options.header,
                encoding=self.options.encoding,
            ),
            parse_options=csv.ParseOptions(delimiter=self._dialect.delimiter),
            convert_options=csv.ConvertOptions(
                column_types=known, include_columns=names, decimal_point=self._dialect.decimal
            ),
        )


_MEND = "it is damaged: copy or write it again"


class ParquetSource(TableSource):
    """A Parquet file."""

    format = "Parquet"

    def _open(self) -> None:
        with self._file() as file:
            if file.metadata.num_columns > MOST_COLUMNS:
                raise DataError(too_many_columns(self.label, file.metadata.num_columns))
            schema, rows = file.schema_arrow, file.metadata.num_rows
            self._check_parts(file)
        if len(set(schema.names)) < len(schema.names):
            raise DataError(f"{self.label}: several columns have the same name; rename them")
        self.types = {field.name: field.type for field in schema if self.options.columns.reads(field.name)}
        self.rows = rows

    def _check_parts(self, file: Any) -> None:
        """Refuse a file that says of its rows one thing here and another there: pyarrow goes by one of them."""
        said, parts = file.metadata, range(file.metadata.num_row_groups)
        flat = [number for number in range(said.num_columns) if not file.schema.column(number).max_repetition_level]
        groups = [said.row_group(group) for group in parts]
        rows = sum(group.num_rows for group in groups)
        if rows != said.num_rows or any(group.num_rows < 0 for group in groups):
            raise DataError(
                f"{self.label}: says that it has {said.num_rows:,} rows, and its parts have {rows:,}; {_MEND}"
            )
        for group in groups:
            for number in flat:
                if group.column(number).num_values != group.num_rows:
                    raise DataError(
                        f"{self.label}: says that a part has {group.num_rows:,} rows, and column "
                        f"{shown(group.column(number).path_in_schema)} has {group.column(number).num_values:,}; {_MEND}"
                    )

    def _surveyed(self) -> list[str]:
        """Return all columns but those of floating-point numbers, whose type says everything."""
        return [name for name, kind in self.types.items() if not self.arrow.types.is_floating(kind)]

    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        rows = max(1, min(_BATCH_ROWS, _BATCH_VALUES // max(1, len(names))))
        first = 0
        with self._file() as file:
            for group in range(file.metadata.num_row_groups):
                length = file.metadata.row_group(group).num_rows
                if first + length <= start:
                    first += length
                    continue
                # one group at a time: what is read ahead of several is kept in memory
                end = first + length
                for batch in file.iter_batches(rows, row_groups=[group], columns=names):
                    yield first, batch
                    first += batch.num_rows
                if first != end:
                    raise DataError(f"{self.label}: ends {end - first:,} rows before it says that it does; {_MEND}")

    def _file(self) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(
            self.paths[0], pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )
