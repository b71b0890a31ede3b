"""CSV, Parquet and Arrow files as sources. pyarrow reads them, with one schema for files with the same columns."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kerasmem.datatools.conversion_settings import ReadOptions
from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.row_source import RowSource
from kerasmem.errors import DataError, KerasmemError, MissingExtraError
from kerasmem.hdf5.format.layout import one_line, quote
from kerasmem.units import MIB

_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather")
SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".txt", *_PARQUET, *_ARROW)
_MOST_COLUMNS = 1 << 16  # of CSV, because pyarrow's time grows with their square
_MOST_TEXTS = 1 << 16  # different texts in a column, and characters of one
_BLOCK_BYTES = 4 * MIB  # of CSV per parse; a row must fit in
_BATCH_VALUES = 1 << 19  # per read of a table
_BUFFER_BYTES = 1 << 16  # per column of a Parquet file
_EXACT = 2**53  # float64 cannot hold all larger whole numbers
_CSV_FIX = (
    "Fix it, leave the column out with drop, or choose how CSV is read: delimiter, decimal, encoding or text "
    "(--delimiter ';', --decimal ',', --encoding latin-1, --text COLUMN)"
)


class TableSource(RowSource):
    """A table file.

    Args:
        path: the file.
        schema: Arrow schema of the columns to read.
        fields: the columns.
        rows: number of rows.
        options: options of CSV.
    """

    starts = (0,)

    def __init__(self, path: str, schema: Any, fields: tuple[Field, ...], rows: int, options: ReadOptions) -> None:
        super().__init__(quote(path), path)
        self._schema, self.fields, self.rows, self._options = schema, fields, rows, options

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows."""
        done = 0
        for batch in _batches(self.paths[0], self._schema, self._options):
            for first in range(0, batch.num_rows, rows):
                columns = zip(self.fields, batch.slice(first, rows).columns, strict=True)
                yield {column.name: _to_numpy(values, column) for column, values in columns}
            done += batch.num_rows
        if done != self.rows:
            raise DataError(f"{self.label}: must have {self.rows:,} rows; got {done:,}. Copy or write it again")


def _to_numpy(values: Any, column: Field) -> np.ndarray:
    import pyarrow as pa
    from pyarrow import compute

    if column.class_names is not None:
        values = compute.index_in(values, value_set=pa.array(column.class_names, values.type))
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(column.dtype, copy=False)


class _Column:
    """A column of all files: the Arrow type to read it with, and facts about the values read so far.

    Whole numbers of CSV are read as float64 until all values are known to be whole.
    """

    def __init__(self, name: str, kind: Any, *, is_csv: bool) -> None:
        import pyarrow as pa

        self.name, self.is_csv = name, is_csv
        self.is_whole = is_csv and kind == pa.int64()
        self.kind = pa.float64() if self.is_whole or pa.types.is_null(kind) else kind
        self.needs_survey = self.is_whole or not pa.types.is_floating(kind)
        self._gaps, self._largest = 0, 0.0
        self._texts = set[str]()

    def add(self, values: Any) -> None:
        """Update the facts with an Arrow array of values."""
        from pyarrow import compute, types

        self._gaps += values.null_count
        if self.is_whole:
            numbers = values.drop_null().to_numpy(zero_copy_only=False)
            self.is_whole = bool((numbers == np.rint(numbers)).all())
            self._largest = max(self._largest, np.abs(numbers).max(initial=0))
        elif types.is_string(self.kind) and len(self._texts) <= _MOST_TEXTS:
            self._texts |= set(compute.unique(values.drop_null()).to_pylist())

    def make_field(self, label: str, options: ReadOptions) -> Field:
        """Return the field of the column after all values were added.

        Raises:
            DataError: If the values cannot be converted to numbers.
        """
        import pyarrow as pa

        label = f"{label}: column {quote(self.name)}"
        kind = self.kind
        if self._gaps and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{label} has {self._gaps:,} missing values; fill them, or leave it out with drop")
        if pa.types.is_string(kind):
            return Field(self.name, "<i4", (), self._class_names(label, is_text=self.name in options.text))
        dtype = np.dtype(kind.to_pandas_dtype())
        if self.is_whole and self._largest > _EXACT:
            self.kind = pa.int64()
        if self.is_whole or self._gaps:
            dtype = np.dtype(np.float64 if self._gaps else np.int64)
        return Field(self.name, dtype.str)

    def _class_names(self, label: str, *, is_text: bool) -> tuple[str, ...]:
        """Return the sorted texts. Raise `DataError` if they are numbers, or too many to be classes."""
        texts = sorted(self._texts)
        if len(texts) > _MOST_TEXTS or max(map(len, texts)) > _MOST_TEXTS:
            many = f"more than {_MOST_TEXTS:,} different texts, or very long ones, such as {quote(texts[0], 40)}"
            raise DataError(f"{label} has {many}; leave it out with drop")
        numbers = [text for text in texts if _is_number(text.replace(",", "."))]
        if numbers and not is_text:
            raise DataError(f"{label} mixes types: texts, and numbers such as {quote(numbers[0], 40)}. {_CSV_FIX}")
        if self.is_csv and any("\n" in text for text in texts):
            raise DataError(f"{label} has a text of several lines; a quote may not be closed. {_CSV_FIX}")
        return tuple(texts)


def open_tables(paths: Sequence[str], options: ReadOptions) -> list[RowSource]:
    """Return one source per file. Files with the same columns get the same types and classes.

    Raises:
        DataError: If a file cannot be read, or its columns cannot be converted to numbers.
        MissingExtraError: If pyarrow is not installed.
    """
    if not paths:
        return []
    try:
        import pyarrow.dataset  # noqa: F401
    except ImportError:
        raise MissingExtraError("reading CSV and Parquet files", "convert") from None
    groups: dict[frozenset[str], dict[str, Any]] = {}
    for path in paths:
        with _refuse_damage(path, options):
            schema = _read_schema(path, options)
            groups.setdefault(frozenset(schema.names), {})[path] = schema
    return [source for schemas in groups.values() for source in _open_alike(schemas, options)]


def _open_alike(schemas: Mapping[str, Any], options: ReadOptions) -> Iterator[TableSource]:
    """Yield one source per file, for files with the same columns."""
    import pyarrow as pa

    first, *others = schemas
    with _refuse_damage(first, options):
        unified = pa.unify_schemas(list(schemas.values()), promote_options="permissive")
    columns = [_Column(column.name, column.type, is_csv=_is_csv(first)) for column in unified]
    surveyed = [column for column in columns if column.needs_survey]
    rows = dict.fromkeys(schemas, 0)
    for path in schemas:
        for batch in _batches(path, pa.schema([(column.name, column.kind) for column in surveyed]), options):
            rows[path] += batch.num_rows
            for column, values in zip(surveyed, batch.columns, strict=True):
                column.add(values)
        if not rows[path]:
            raise DataError(f"{quote(path)}: has a header and no rows")
    label = f"{quote(first)} and {len(others):,} more" if others else quote(first)
    fields = tuple(column.make_field(label, options) for column in columns)
    schema = pa.schema([(column.name, column.kind) for column in columns])
    for path in schemas:
        yield TableSource(path, schema, fields, rows[path], options)


def _read_schema(path: str, options: ReadOptions) -> Any:
    """Return the Arrow schema of the columns to read. Types of CSV are inferred from its first block.

    Raises:
        DataError: If columns cannot be converted to numbers.
    """
    import pyarrow as pa

    label = quote(path)
    if _is_csv(path):
        with pa.input_stream(path) as file:
            columns = file.read(_BLOCK_BYTES).partition(b"\n")[0].count(_delimiter(path, options).encode()) + 1
        if columns > _MOST_COLUMNS:
            raise DataError(f"{label}: has {columns:,} columns; {_MOST_COLUMNS:,} are allowed. Save them as .npy")
    schema = _dataset(path, options).schema
    names = schema.names
    if len(names) == 1 and ";" in names[0]:
        raise DataError(f"{label}: the first row has semicolons; pass delimiter=';' (--delimiter ';')")
    if all(map(_is_number, names)):
        first = quote(", ".join(names[:4]))
        raise DataError(
            f"{label}: the first row must name the columns; got the numbers {first}. If it is data, pass header=False "
            "(--no-header)"
        )
    read = [column for column in schema if options.columns.reads(column.name)]
    if not read:
        options.columns.refuse_empty(label)
    return pa.schema([(item.name, _plain_type(item.type, f"{label}: column {quote(item.name)}")) for item in read])


def _plain_type(kind: Any, label: str) -> Any:
    """Return the Arrow type to read a column with."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind):
        return pa.string()
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind):
        return kind
    raise DataError(f"{label} must hold numbers or texts; got {kind}. {_CSV_FIX}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_csv(path: str) -> bool:
    return not path.lower().endswith((*_PARQUET, *_ARROW))


def _delimiter(path: str, options: ReadOptions) -> str:
    is_tabbed = path.lower().removesuffix(".gz").endswith(".tsv")
    return options.delimiter or ("\t" if is_tabbed else ",")


def _batches(path: str, schema: Any, options: ReadOptions) -> Iterator[Any]:
    """Yield record batches."""
    rows = max(1, _BATCH_VALUES // max(8, len(schema)))
    with _refuse_damage(path, options):
        data = _dataset(path, options, schema)
        yield from data.to_batches(batch_size=rows, batch_readahead=1, fragment_readahead=1)


def _dataset(path: str, options: ReadOptions, schema: Any = None) -> Any:
    """Open a file with pyarrow."""
    from pyarrow import csv, dataset, string

    kind: Any = "ipc"
    if _is_csv(path):
        types = {column.name: column.type for column in schema or ()} | dict.fromkeys(options.text, string())
        kind = dataset.CsvFileFormat(
            csv.ParseOptions(delimiter=_delimiter(path, options)),
            convert_options=csv.ConvertOptions(column_types=types, decimal_point=options.decimal),
            read_options=csv.ReadOptions(
                block_size=_BLOCK_BYTES, encoding=options.encoding, autogenerate_column_names=not options.header
            ),
        )
    elif path.lower().endswith(_PARQUET):
        scan = dataset.ParquetFragmentScanOptions(
            use_buffered_stream=True, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )
        kind = dataset.ParquetFileFormat(default_fragment_scan_options=scan)
    return dataset.dataset(path, schema, kind)


@contextlib.contextmanager
def _refuse_damage(path: str, options: ReadOptions) -> Iterator[None]:
    """Raise errors of pyarrow as `DataError` with the column's name and a fix."""
    import pyarrow as pa

    try:
        yield
    except KerasmemError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        reason = one_line(str(error).rpartition("Invalid: ")[2], 400)
        if column := re.match(r"In CSV column #(\d+)", reason):
            reason = f"column {quote(_dataset(path, options).schema.names[int(column[1])])}: {reason}"
        fix = _CSV_FIX if _is_csv(path) else "Copy or write it again"
        raise DataError(f"{quote(path)}: cannot be read: {reason}. {fix}") from error
