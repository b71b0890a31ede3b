"""CSV and Parquet files, batch by batch, as pyarrow reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kerasmem.datatools.converting.settings import ReadOptions
from kerasmem.datatools.converting.sources.tables import BLOCK_BYTES, Column, TableSource, agree, is_number
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import one_line, shown

_BATCH_ROWS = 1 << 16
_BATCH_VALUES = 1 << 19  # of a table with many columns, read at a time
_BUFFER_BYTES = 1 << 16  # read from the file at a time, a column each
_NUMBER = re.compile(r"In CSV column #(\d+): (.*)", re.DOTALL)
_WORDS = {"int64": "whole numbers", "double": "numbers", "string": "text", "bool": "true and false"}


def open_tables(paths: Sequence[str], options: ReadOptions) -> list[TableSource]:
    """Return a source a file, those with the same columns agreed on their types.

    Raises:
        DataError: a file cannot be read, or its columns cannot be made numbers.
    """
    groups: dict[frozenset[str], list[TableSource]] = {}
    for path in paths:
        kind = ParquetSource if path.lower().endswith((".parquet", ".pq")) else CsvSource
        source = kind(path, options)
        groups.setdefault(frozenset(source.columns), []).append(source)
    for group in groups.values():
        agree(group, options.text)
    return [source for group in groups.values() for source in group]


class CsvSource(TableSource):
    """A CSV file; its types are settled by reading it once."""

    format = "CSV"

    def settle(self, columns: dict[str, Column]) -> None:
        """Take over the types that all files agree on, as which the columns are read from now on."""
        super().settle(columns)
        arrow = self.arrow
        types = {"int": arrow.int64(), "float": arrow.float64(), "text": arrow.string(), "bool": arrow.bool_()}
        self.types = {name: types[column.kind] for name, column in columns.items()}

    def _open(self) -> None:
        self.types = {}
        with self._reader(None) as reader:
            self._all, kinds = list(reader.schema.names), list(reader.schema.types)
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
        self.types = {
            name: kind for name, kind in zip(self._all, kinds, strict=True) if self.options.columns.reads(name)
        }

    def _survey(self) -> dict[str, Column]:
        """Look through the file, from the beginning again where a column turns out to be wider than thought."""
        while True:
            self.rows = 0
            try:
                return super()._survey()
            except self.arrow.ArrowInvalid as error:
                found = _NUMBER.search(str(error))
                if found is None:
                    raise
                self._widen(self._all[int(found[1])], one_line(found[2], 200))

    def _widen(self, name: str, reason: str) -> None:
        arrow, before = self.arrow, self.types[name]
        if arrow.types.is_null(before):
            self.types[name] = arrow.int64()
        elif arrow.types.is_int64(before):
            self.types[name] = arrow.float64()
        elif self.rows == 0 and arrow.types.is_floating(before):
            self.types[name] = arrow.string()  # nothing but gaps before: the first value is no number
        else:
            word = _WORDS.get(str(before), str(before))
            raise DataError(
                f"{self.label}: column {shown(name)} mixes types: it holds {word} first, and somewhere after "
                f"row {self.rows:,} something else ({reason}); mend it, leave the column out with drop, or read it as "
                "text with text"
            )

    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        first = 0
        with self._reader(names) as reader:
            for batch in reader:
                yield first, batch
                first += batch.num_rows

    def _reader(self, names: list[str] | None) -> Any:
        from pyarrow import csv

        has_tabs = self.paths[0].lower().removesuffix(".gz").endswith(".tsv")
        types = {**self.types, **dict.fromkeys(self.options.text, self.arrow.string())}
        return csv.open_csv(
            self.paths[0],
            read_options=csv.ReadOptions(block_size=BLOCK_BYTES, autogenerate_column_names=not self.options.header),
            parse_options=csv.ParseOptions(delimiter=self.options.delimiter or ("\t" if has_tabs else ",")),
            convert_options=csv.ConvertOptions(column_types=types, include_columns=names),
        )


class ParquetSource(TableSource):
    """A Parquet file."""

    format = "Parquet"

    def _open(self) -> None:
        with self._file() as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        if len(set(schema.names)) < len(schema.names):
            raise DataError(f"{self.label}: several columns have the same name; rename them")
        self.types = {field.name: field.type for field in schema if self.options.columns.reads(field.name)}
        self.rows = rows

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
                for batch in file.iter_batches(rows, row_groups=[group], columns=names):
                    yield first, batch
                    first += batch.num_rows

    def _file(self) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(
            self.paths[0], pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )
