"""CSV files as sources, read through pyarrow."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kerasmem.datatools.sources.tables import (
    BLOCK_BYTES,
    MIXED,
    MOST_COLUMNS,
    NOT_UTF8,
    Column,
    TableSource,
    is_number,
    refuse_width,
)
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import one_line, shown

_CONVERSION = re.compile(r"In CSV column #(\d+): (.*)", re.DOTALL)  # how pyarrow begins an error


class CsvSource(TableSource):
    """A CSV file, read once to settle its types."""

    starts = (0,)

    def settle(self, columns: dict[str, Column]) -> None:
        """Take over the types that all files agree on."""
        super().settle(columns)
        arrow = self.arrow
        types = {"int": arrow.int64(), "float": arrow.float64(), "text": arrow.string(), "bool": arrow.bool_()}
        self.types = {name: types[column.kind] for name, column in columns.items()}

    def _open(self) -> None:
        self.types = {}
        self._delimiter = _choose_delimiter(self)
        with self._reader(None) as reader:
            self._all, kinds = list(reader.schema.names), list(reader.schema.types)
        twice = [name for name, count in Counter(self._all).items() if count > 1]
        if twice:
            raise DataError(f"{self.label}: several columns are called {shown(twice[0])}; rename them")
        if self.options.header and self._all and all(map(is_number, self._all)):
            first = shown(", ".join(self._all[:4]))
            raise DataError(
                f"{self.label}: the first row holds numbers ({first}), no names. If it is data, pass header=False "
                "(--no-header)."
            )
        named = zip(self._all, kinds, strict=True)
        self.types = {name: kind for name, kind in named if self.options.columns.reads(name)}
        for name, kind in self.types.items():
            if self.arrow.types.is_binary(kind):
                raise self.error(name, f"holds the type binary: {NOT_UTF8}")

    def _survey(self) -> dict[str, Column]:
        """Read through the file, from the beginning again if a column turns out to be wider than thought."""
        while True:
            self.rows = 0
            try:
                return super()._survey()
            except self.arrow.ArrowInvalid as error:
                number = _CONVERSION.search(str(error))
                if number is None:
                    raise
                self._widen(self._all[int(number[1])], one_line(number[2], 200))

    def _widen(self, name: str, reason: str) -> None:
        arrow, before = self.arrow, self.types[name]
        if arrow.types.is_null(before):
            self.types[name] = arrow.int64()
        elif arrow.types.is_int64(before):
            self.types[name] = arrow.float64()
        elif self.rows == 0 and arrow.types.is_floating(before):
            self.types[name] = arrow.string()  # nothing but gaps before: the first value is no number
        elif "UTF8" in reason:
            raise self.error(name, f"cannot be read after row {self.rows:,}: {NOT_UTF8}")
        else:
            place = f"mixes types: it holds {before} first, and after row {self.rows:,}"
            raise self.error(name, f"{place} {reason}. {MIXED}")

    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        first = 0
        with self._reader(names) as reader:
            for batch in reader:
                yield first, batch
                first += batch.num_rows

    def _reader(self, names: list[str] | None) -> Any:
        from pyarrow import csv

        known = {**self.types, **dict.fromkeys(self.options.text, self.arrow.string())}
        header, encoding, decimal = self.options.header, self.options.encoding, self.options.decimal
        return csv.open_csv(
            self.paths[0],
            csv.ReadOptions(block_size=BLOCK_BYTES, autogenerate_column_names=not header, encoding=encoding),
            csv.ParseOptions(delimiter=self._delimiter),
            csv.ConvertOptions(column_types=known, include_columns=names, decimal_point=decimal),
        )


def _choose_delimiter(source: CsvSource) -> str:
    """Return the character between values: that of the options, a tab in .tsv, or else a comma.

    Raises:
        DataError: If there are far too many columns.
    """
    path, options = source.paths[0], source.options
    usual = "\t" if path.lower().removesuffix(".gz").endswith(".tsv") else ","
    delimiter = options.delimiter or usual
    with source.arrow.input_stream(path) as file:
        names = file.read(BLOCK_BYTES).split(b"\n", 1)[0].decode(options.encoding, "replace")
    if names.count(delimiter) >= MOST_COLUMNS:
        refuse_width(source.label, names.count(delimiter) + 1)
    if options.delimiter is None and delimiter not in names and ";" in names:
        raise DataError(f"{source.label}: the first row has semicolons; pass delimiter=';' (--delimiter ';')")
    return delimiter
