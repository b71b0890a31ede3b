"""Tables as sources: column types are settled over all files, texts become classes."""

from __future__ import annotations

import contextlib
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from kerasmem.datatools.fields import Field, Rows, check_name
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError, MissingExtraError, UsageError
from kerasmem.hdf5.format.layout import one_line, shown
from kerasmem.units import MIB

MOST_COLUMNS = 1 << 16  # of a table: the libraries that read one take some 10 kB for each column
_MOST_TEXTS = 1 << 16  # different ones in a column
_TEXT_BYTES = 1 << 16  # of one of them
BLOCK_BYTES = 4 * MIB  # of CSV parsed at a time; a row has to fit in
_BATCH_ROWS = 1 << 16
_BATCH_VALUES = 1 << 19  # of a table with many columns, read at a time
_BUFFER_BYTES = 1 << 16  # read from a Parquet file at a time, a column each
MIXED = "Fix it, leave the column out with drop, or read it as text with text (--text)."
_DAMAGED = "it is damaged: copy or write it again"
NOT_UTF8 = "it is not UTF-8. Name its encoding, such as encoding='latin-1' (--encoding latin-1)"


@dataclass
class Column:
    """Content of a column, as far as it was read."""

    kind: str  # int, float, bool, text, prose (too many texts), null
    dtype: str = ""
    width: int | None = None  # of lists; -1 if not known yet
    gaps: int = 0
    texts: set[str] = field(default_factory=set)


class TableSource(RowSource):
    """A file of columns, read through pyarrow, with types from `agree_on_types`.

    Args:
        path: the file.
        options: reading options.

    Attributes:
        types: the Arrow types of the columns that are read, by name.
        columns: their content.

    Raises:
        DataError: If the file cannot be read.
        MissingExtraError: If pyarrow is not installed.
    """

    types: dict[str, Any]

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(shown(path), path)
        self.options, self.rows, self.fields = options, 0, ()
        self._names: dict[str, str] = {}
        try:
            import pyarrow.compute
        except ImportError:
            raise MissingExtraError("reading CSV and Parquet files", "convert") from None
        self.arrow = pyarrow
        with _arrow_errors(self.label):
            self._open()
            self.columns = self._survey() if self.types else {}
        if not self.types:
            raise UsageError(f"drop: no column of {self.label} is left to be written")
        if not self.rows:
            raise DataError(f"{self.label}: has a header and no rows")

    @abstractmethod
    def _open(self) -> None:
        """Find the columns and their types, as far as the file tells."""

    @abstractmethod
    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        """Yield record batches from about `start` on, and the number of their first row."""

    def _surveyed(self) -> list[str]:
        """Return the columns to be read through for their types."""
        return list(self.types)

    def _survey(self) -> dict[str, Column]:
        """Read through the file and return the content of its columns."""
        found = {name: self._column(name, kind) for name, kind in self.types.items()}
        names = self._surveyed()
        for first, batch in self._batches(names, 0) if names else ():
            self.rows = first + batch.num_rows
            for name, values in zip(batch.schema.names, batch.columns, strict=True):
                self._add(name, values, found[name])
        return found

    def settle(self, columns: dict[str, Column]) -> None:
        """Take over the types that all files agree on."""
        self._names = {check_name(name, self.label): name for name in columns}
        fields = []
        for name, original in self._names.items():
            column = columns[original]
            dtype = {"text": "<i4", "bool": "|b1"}.get(column.kind, column.dtype)
            names = tuple(sorted(column.texts)) if column.kind == "text" else None
            fields.append(Field(name, dtype, () if column.width is None else (column.width,), names))
            if column.kind == "float" and column.gaps and column.dtype == "<f8":
                self.notes.append(f"{shown(name)} has {column.gaps:,} gaps, which become NaN")
        self.fields = tuple(fields)

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows."""
        with _arrow_errors(self.label):
            for first, batch in self._batches([self._names[each.name] for each in self.fields], start):
                for at in range(max(0, start - first), batch.num_rows, rows):
                    part = batch.slice(at, rows)
                    yield {each.name: self._values(part, each) for each in self.fields}

    def error(self, name: str, problem: str) -> DataError:
        """Return the error for a column."""
        return DataError(f"{self.label}: column {shown(name)} {problem}")

    def _column(self, name: str, kind: Any) -> Column:
        types = self.arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            inner = self._column(name, kind.value_type)
            if inner.kind in ("text", "null") or inner.width is not None:
                raise self.error(name, f"holds lists of {kind.value_type}; only lists of numbers can be written")
            inner.width = int(kind.list_size) if types.is_fixed_size_list(kind) else -1
            return inner
        if types.is_null(kind):
            return Column("null")
        if types.is_string(kind) or types.is_large_string(kind):
            return Column("text")
        for plain, is_plain in (("bool", types.is_boolean), ("int", types.is_integer), ("float", types.is_floating)):
            if is_plain(kind):
                return Column(plain, np.dtype(kind.to_pandas_dtype()).str)
        what = "dates or times" if types.is_temporal(kind) else f"the type {kind}"
        raise self.error(name, f"holds {what}, no numbers; convert it, or leave it out with drop")

    def _add(self, name: str, values: Any, column: Column) -> None:
        compute = self.arrow.compute
        column.gaps += values.null_count
        if column.width is not None:
            lengths = compute.min_max(compute.list_value_length(values)).as_py()
            width = lengths["max"] if column.width == -1 else column.width
            if values.null_count:
                row = self.rows - len(values) + compute.index(compute.is_null(values), True).as_py()
                raise self.error(
                    name, f"has no list in row {row:,}, counted from 0; fill the gap, or leave the column out"
                )
            if lengths["min"] != width or lengths["max"] != width:
                least, most = lengths["min"], lengths["max"]
                raise self.error(name, f"is ragged: lists of {least} to {most} values; pad them to one length")
            column.width = int(width)
            column.gaps += values.flatten().null_count
        if column.kind == "text":
            texts = [text for text in compute.unique(values).to_pylist() if text is not None]
            if any("\n" in text for text in texts):
                raise self.error(name, "holds a text of several lines: perhaps a quote is never closed; fix or drop it")
            column.texts.update(texts)
            if len(column.texts) > _MOST_TEXTS or any(len(text) > _TEXT_BYTES for text in texts):
                column.kind = "prose"
                column.texts = {min(column.texts, key=lambda text: (is_number(text), text))}  # an example, no number

    def _values(self, batch: Any, wanted: Field) -> np.ndarray:
        values = batch.column(batch.schema.get_field_index(self._names[wanted.name]))
        if wanted.class_names is not None:
            text = self.arrow.string()
            classes = self.arrow.array(wanted.class_names, text)
            values = self.arrow.compute.index_in(values.cast(text), value_set=classes)
        if wanted.shape:
            values = values.flatten()
        array = np.asarray(values.to_numpy(zero_copy_only=False)).astype(wanted.dtype, copy=False)
        return array.reshape(batch.num_rows, *wanted.shape)


class ParquetSource(TableSource):
    """A Parquet file."""

    def _open(self) -> None:
        with self._file() as file:
            if file.metadata.num_columns > MOST_COLUMNS:
                refuse_width(self.label, file.metadata.num_columns)
            schema, self.rows = file.schema_arrow, file.metadata.num_rows
            self._check_groups(file)
        if len(set(schema.names)) < len(schema.names):
            raise DataError(f"{self.label}: several columns have the same name; rename them")
        self.types = {field.name: field.type for field in schema if self.options.columns.reads(field.name)}

    def _check_groups(self, file: Any) -> None:
        """Refuse a file whose counts of rows contradict each other: pyarrow goes by one of them."""
        counts, groups = file.metadata, [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
        flat = [k for k in range(counts.num_columns) if not file.schema.column(k).max_repetition_level]
        rows = sum(group.num_rows for group in groups)
        if rows != counts.num_rows or any(group.num_rows < 0 for group in groups):
            raise DataError(f"{self.label}: claims {counts.num_rows:,} rows, and its parts have {rows:,}; {_DAMAGED}")
        for group in groups:
            for column in map(group.column, flat):
                if column.num_values != group.num_rows:
                    told, name = f"a part claims {group.num_rows:,} rows", shown(column.path_in_schema)
                    raise DataError(f"{self.label}: {told}, and column {name} has {column.num_values:,}; {_DAMAGED}")

    def _surveyed(self) -> list[str]:
        """Return all columns except floating-point ones, for their type is enough."""
        return [name for name, kind in self.types.items() if not self.arrow.types.is_floating(kind)]

    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        rows = max(1, min(_BATCH_ROWS, _BATCH_VALUES // max(1, len(names))))
        first = 0
        with self._file() as file:
            for group in range(file.metadata.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                if end <= start:
                    first = end
                    continue
                # one group at a time: what is read ahead of several is kept in memory
                for batch in file.iter_batches(rows, row_groups=[group], columns=names):
                    yield first, batch
                    first += batch.num_rows
                if first != end:
                    raise DataError(f"{self.label}: ends {end - first:,} rows before it claims to; {_DAMAGED}")

    def _file(self) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(
            self.paths[0], pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )


def agree_on_types(sources: Sequence[TableSource], as_text: Sequence[str]) -> None:
    """Settle one type for each column over all files.

    Raises:
        DataError: If they hold different things, or values that cannot be made numbers.
    """
    agreed: dict[str, Column] = {}
    for name in sources[0].columns:
        found = [source.columns[name] for source in sources]
        kinds = {column.kind for column in found} - {"null"}
        where = f"{sources[0].label if len(sources) == 1 else f'the {len(sources)} tables'}: column {shown(name)}"
        if not kinds:
            raise DataError(f"{where} is empty; leave it out with drop")
        if len(kinds) > 1 and kinds != {"int", "float"}:
            raise DataError(f"{where} mixes types: {' and '.join(sorted(kinds))} in different files. {MIXED}")
        if len({column.width for column in found}) > 1:
            raise DataError(f"{where} holds lists of different lengths in different files; pad them")
        dtypes = [np.dtype(column.dtype) for column in found if column.dtype]
        agreed[name] = Column(
            max(kinds, key="int float".find),
            np.result_type(*dtypes).newbyteorder("<").str if dtypes else "",
            found[0].width,
            sum(column.gaps for column in found),
            set().union(*(column.texts for column in found)),
        )
        _check(agreed[name], where, name in as_text)
    for source in sources:
        source.settle(agreed)


def _check(column: Column, where: str, as_text: bool) -> None:
    """Refuse columns that cannot be numbers."""
    if column.kind == "prose":
        example = shown(min(column.texts), 40)
        raise DataError(
            f"{where} holds more than {_MOST_TEXTS:,} different texts, or very long ones, such as {example}. Fix them "
            "if the others are numbers, or leave the column out with drop."
        )
    if column.kind in ("text", "bool") and column.gaps:
        raise DataError(f"{where} has {column.gaps:,} gaps among its values; fill them, or leave it out with drop")
    if column.kind == "int" and column.gaps:
        column.kind, column.dtype = "float", "<f8"
    numbers = {text for text in column.texts if is_number(text.replace(",", "."))} if column.kind == "text" else set()
    if numbers and not as_text:
        texts = column.texts - numbers
        example = shown(min(numbers), 40) + (f" and texts such as {shown(min(texts), 40)}" if texts else "")
        commas = ", name decimal commas with decimal (--decimal ',')" if any("," in text for text in numbers) else ""
        raise DataError(f"{where} mixes types: numbers such as {example}{commas}. {MIXED}")


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _arrow_errors(label: str) -> Iterator[None]:
    """Raise errors of pyarrow as a `DataError`."""
    import pyarrow

    try:
        yield
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, OverflowError, EOFError, zlib.error) as error:
        raise DataError(f"{label}: cannot be read: {_reason(one_line(str(error), 400))}") from error


def _reason(text: str) -> str:
    if "Expected" in text and "columns, got" in text:
        return f"{text}; every row needs as many values as the first. Fix the row, or name the separator: delimiter"
    if "straddling object" in text or "block_size" in text:
        return f"a row is longer than {BLOCK_BYTES:,} bytes, or a quote is never closed ({text})"
    if "codec can't decode" in text or "UTF8" in text:
        return f"{NOT_UTF8} ({text})"
    return "the file is empty" if "Empty CSV" in text else text


def refuse_width(label: str, count: int) -> NoReturn:
    """Raise the error for a table with too many columns."""
    raise DataError(
        f"{label}: has {count:,} columns, and {MOST_COLUMNS:,} are read. Save the numbers as one array with np.save."
    )
