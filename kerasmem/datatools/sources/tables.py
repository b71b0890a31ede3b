"""CSV and Parquet files as sources: column types are settled over all files, texts become classes."""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

import numpy as np

from kerasmem.datatools.fields import Field, Rows, check_name
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError, MissingExtraError, UsageError
from kerasmem.hdf5.format.layout import one_line, shown
from kerasmem.units import MIB

_MOST_COLUMNS = 1 << 16  # of a table: the libraries that read one take some 10 kB for each column
_MOST_TEXTS = 1 << 16  # different ones in a column
_TEXT_BYTES = 1 << 16  # of one of them
_BLOCK_BYTES = 4 * MIB  # of CSV parsed at a time; a row has to fit in
_BATCH_ROWS = 1 << 16
_BATCH_VALUES = 1 << 19  # of a table with many columns, read at a time
_BUFFER_BYTES = 1 << 16  # read from a Parquet file at a time, a column each
_MIXED = "Fix it, leave the column out with drop, or read it as text with text (--text)."
_DAMAGED = "it is damaged: copy or write it again"
_NOT_UTF8 = "it is not UTF-8. Name its encoding, such as encoding='latin-1' (--encoding latin-1)"
_LETTERS = {"int64": "whole numbers", "double": "numbers", "string": "text", "bool": "true and false"}
_CONVERSION = re.compile(r"In CSV column #(\d+): (.*)", re.DOTALL)  # how pyarrow begins an error
_LARGEST_ID = 2**128  # whole numbers of more digits are no identifiers
_QUOTED = re.compile(r'"[^"]*"')


@dataclass
class Column:
    """Content of a column, as far as it was read."""

    kind: str  # int, float, bool, text, prose (too many texts), null
    dtype: str = ""
    width: int | None = None  # of lists; -1 if not known yet
    gaps: int = 0
    texts: set[str] = field(default_factory=set)


class TableSource(RowSource):
    """One file of columns, read through pyarrow; the columns get their types from `_agree`.

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
        """Yield record batches and the number of their first row; those before `start` may be left out."""

    def _surveyed(self) -> list[str]:
        """Return the columns to be read through for their types."""
        return list(self.types)

    def _survey(self) -> dict[str, Column]:
        """Read through the file; return the content of its columns."""
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
            column.texts.update(text for text in compute.unique(values).to_pylist() if text is not None)
            if len(column.texts) > _MOST_TEXTS or any(len(text) > _TEXT_BYTES for text in column.texts):
                column.kind = "prose"
                column.texts = {min(column.texts, key=lambda text: (_is_number(text), text))}  # an example, no number

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


class CsvSource(TableSource):
    """A CSV file; its types are settled by reading it once."""

    starts = (0,)

    def settle(self, columns: dict[str, Column]) -> None:
        """Take over the types that all files agree on; the columns are read as these from now on."""
        super().settle(columns)
        arrow = self.arrow
        types = {"int": arrow.int64(), "float": arrow.float64(), "text": arrow.string(), "bool": arrow.bool_()}
        self.types = {name: types[column.kind] for name, column in columns.items()}

    def _open(self) -> None:
        self.types = {}
        self._ends_within: set[str] = set()
        self._large: set[str] = set()
        self._delimiter = _choose_delimiter(self.paths[0], self.label, self.options)
        with self._reader(None) as reader:
            self._all, kinds = list(reader.schema.names), list(reader.schema.types)
        twice = [name for name, count in Counter(self._all).items() if count > 1]
        if twice:
            raise DataError(f"{self.label}: several columns are called {shown(twice[0])}; rename them")
        if self.options.header and self._all and all(map(_is_number, self._all)):
            first = shown(", ".join(self._all[:4]))
            raise DataError(
                f"{self.label}: the first row holds numbers ({first}), no names. If it is data, pass header=False "
                "(--no-header)."
            )
        named = zip(self._all, kinds, strict=True)
        self.types = {name: kind for name, kind in named if self.options.columns.reads(name)}
        for name, kind in self.types.items():
            if self.arrow.types.is_binary(kind):
                raise self.error(name, f"holds the type binary: {_NOT_UTF8}")

    def _survey(self) -> dict[str, Column]:
        """Read through the file, from the beginning again if a column turns out to be wider than thought."""
        while True:
            self.rows, self._ends_within, self._large = 0, set(), set()
            try:
                found = super()._survey()
            except self.arrow.ArrowInvalid as error:
                number = _CONVERSION.search(str(error))
                if number is None:
                    raise
                self._widen(self._all[int(number[1])], one_line(number[2], 200))
                continue
            self._note_losses()
            return found

    def _note_losses(self) -> None:
        """Refuse or note values that are not read as they stand in the file."""
        if self._ends_within and _has_odd_quotes(self.paths[0]):
            name = shown(min(self._ends_within))
            raise DataError(f"{self.label}: a quote is never closed: {name} of the last row goes on to the file's end")
        for name in sorted(self._large):
            self.notes.append(
                f"{shown(name)} has numbers beyond int64; whole ones are rounded, and text (--text) keeps them apart"
            )

    def _add(self, name: str, values: Any, column: Column) -> None:
        super()._add(name, values, column)
        if not len(values):
            return
        if column.kind == "float":
            limits = self.arrow.compute.min_max(values).as_py()
            if any(2**63 <= abs(limit or 0) < _LARGEST_ID for limit in limits.values()):
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
            raise self.error(name, f"cannot be read after row {self.rows:,}: {_NOT_UTF8}")
        else:
            word = _LETTERS.get(str(before), str(before))
            place = f"mixes types: it holds {word} first, and after row {self.rows:,}"
            raise self.error(name, f"{place} {reason}. {_MIXED}")

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
            csv.ReadOptions(block_size=_BLOCK_BYTES, autogenerate_column_names=not header, encoding=encoding),
            csv.ParseOptions(delimiter=self._delimiter),
            csv.ConvertOptions(column_types=known, include_columns=names, decimal_point=decimal),
        )


class ParquetSource(TableSource):
    """A Parquet file."""

    def _open(self) -> None:
        with self._file() as file:
            if file.metadata.num_columns > _MOST_COLUMNS:
                _refuse_width(self.label, file.metadata.num_columns)
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


def open_tables(paths: Sequence[str], options: ReadOptions) -> list[TableSource]:
    """Return a source for each file, after those with the same columns agreed on their types.

    Raises:
        DataError: If a file cannot be read, or its columns cannot be made numbers.
    """
    opened: list[TableSource] = []
    for path in paths:
        kind = ParquetSource if path.lower().endswith((".parquet", ".pq")) else CsvSource
        opened.append(kind(path, options))
    groups: dict[frozenset[str], list[TableSource]] = {}
    for each in opened:
        groups.setdefault(frozenset(each.columns), []).append(each)
    for group in groups.values():
        _agree(group, options.text)
    return [source for group in groups.values() for source in group]


def _agree(sources: Sequence[TableSource], as_text: Sequence[str]) -> None:
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
            raise DataError(f"{where} mixes types: {' and '.join(sorted(kinds))} in different files. {_MIXED}")
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
    if column.kind == "text" and not as_text:
        commas = [text for text in column.texts if "," in text]
        if commas and all(_is_number(text.replace(",", ".")) for text in column.texts):
            fix = (
                "If they are decimal commas, pass decimal=',' (--decimal ','); else read it as text with text (--text)"
            )
            raise DataError(f"{where} holds numbers with commas, such as {shown(min(commas), 40)}. {fix}.")
        numbers = set(filter(_is_number, column.texts))
        if numbers and len(numbers) < len(column.texts):
            one, other = shown(min(numbers), 40), shown(min(column.texts - numbers), 40)
            raise DataError(f"{where} mixes types: numbers such as {one} and texts such as {other}. {_MIXED}")


def _is_number(text: str) -> bool:
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
        return f"a row is longer than {_BLOCK_BYTES:,} bytes, or a quote is never closed ({text})"
    if "codec can't decode" in text or "UTF8" in text:
        return f"{_NOT_UTF8} ({text})"
    return "the file is empty" if "Empty CSV" in text else text


def _choose_delimiter(path: str, label: str, options: ReadOptions) -> str:
    """Return the character between values: that of the options, or the usual one of the file.

    Raises:
        DataError: If there are far too many columns.
    """
    with _opened(path) as file:
        names = _QUOTED.sub("", file.readline(_BLOCK_BYTES).decode(options.encoding, "replace"))
    has_tabs = path.lower().removesuffix(".gz").endswith(".tsv")
    usual = "\t" if has_tabs else ";" if ";" in names and "," not in names else ","
    delimiter = options.delimiter or usual
    if names.count(delimiter) >= _MOST_COLUMNS:
        _refuse_width(label, names.count(delimiter) + 1)
    return delimiter


def _refuse_width(label: str, count: int) -> NoReturn:
    raise DataError(
        f"{label}: has {count:,} columns, and {_MOST_COLUMNS:,} are read. Save the numbers as one array with np.save."
    )


def _has_odd_quotes(path: str) -> bool:
    """Return whether one of the file's quotes may never be closed."""
    with _opened(path) as file:
        return sum(block.count(b'"') for block in iter(lambda: file.read(_BLOCK_BYTES), b"")) % 2 == 1


def _opened(path: str) -> IO[bytes]:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]
