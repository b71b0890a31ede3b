"""CSV and Parquet files as sources: column types are settled over all files, texts become classes."""

from __future__ import annotations

import contextlib
import functools
import gzip
import re
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

import numpy as np

from kerasmem.datatools.converting.fields import Field, Rows, check_name
from kerasmem.datatools.converting.settings import ReadOptions
from kerasmem.datatools.converting.sources.row_source import RowSource
from kerasmem.errors import DataError, MissingExtraError, UsageError
from kerasmem.hdf5.layout import one_line, shown
from kerasmem.units import MIB

MIXED = "mend it, leave the column out with drop, or read it as text with text (--text)"
_MOST_TEXTS = 1 << 16  # different ones in a column
_TEXT_BYTES = 1 << 16  # of one of them


@dataclass
class Column:
    """What a column turns out to hold."""

    kind: str  # int, float, bool, text, prose (too many texts), mixed (as many, most of them numbers), null
    dtype: str = ""
    width: int | None = None  # of lists
    gaps: int = 0
    texts: set[str] = field(default_factory=set)


class TableSource(RowSource):
    """One file of columns, read through pyarrow; the columns get their types from `agree`.

    Args:
        path: the file.
        options: how it is read, and which columns matter.

    Attributes:
        types: the Arrow types of the columns that are read, by name; set by `_open`.
        columns: what they hold.

    Raises:
        DataError: the file cannot be read.
        MissingExtraError: pyarrow is not installed.
    """

    format: ClassVar[str]
    types: dict[str, Any]

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(shown(path), path)
        self.options, self.rows, self.fields = options, 0, ()
        self._names: dict[str, str] = {}
        try:
            import pyarrow.compute
        except ImportError:
            raise MissingExtraError(f"reading {self.format} files", "convert") from None
        self.arrow = pyarrow
        with arrow_errors(self.label):
            self._open()
            self.columns = self._survey() if self.types else {}
        if not self.types:
            raise UsageError(f"drop: no column of {self.label} is left to be written")
        if not self.rows:
            raise DataError(f"{self.label}: has a header and no rows")

    @abstractmethod
    def _open(self) -> None:
        """Find the columns and what their types are, as far as the file says."""

    @abstractmethod
    def _batches(self, names: list[str], start: int) -> Iterator[tuple[int, Any]]:
        """Yield record batches and the number of their first row; those before `start` may be left out."""

    def _surveyed(self) -> list[str]:
        """Return the columns that have to be looked through for their types."""
        return list(self.types)

    def _survey(self) -> dict[str, Column]:
        """Look through the file; return what its columns hold."""
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
        with arrow_errors(self.label):
            for first, batch in self._batches([self._names[each.name] for each in self.fields], start):
                for at in range(max(0, start - first), batch.num_rows, rows):
                    part = batch.slice(at, rows)
                    yield {each.name: self._values(part, each) for each in self.fields}

    def _column(self, name: str, kind: Any) -> Column:
        types = self.arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            inner = self._column(name, kind.value_type)
            if inner.kind in ("text", "null") or inner.width is not None:
                raise DataError(
                    f"{self.label}: column {shown(name)} holds lists of {kind.value_type}; only lists of numbers can "
                    "be written"
                )
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
        raise DataError(
            f"{self.label}: column {shown(name)} holds {what}, no numbers; convert it, or leave it out with drop"
        )

    def _add(self, name: str, values: Any, column: Column) -> None:
        compute = self.arrow.compute
        column.gaps += values.null_count
        if column.width is not None:
            lengths = compute.min_max(compute.list_value_length(values)).as_py()
            width = lengths["max"] if column.width == -1 else column.width
            if values.null_count:
                row = self.rows - len(values) + compute.index(compute.is_null(values), True).as_py()
                raise DataError(
                    f"{self.label}: column {shown(name)} has no list in row {row:,}, counted from 0; fill the gap, or "
                    "leave the row or the column out"
                )
            if lengths["min"] != width or lengths["max"] != width:
                raise DataError(
                    f"{self.label}: column {shown(name)} is ragged: lists of {lengths['min']} to {lengths['max']} "
                    "values; pad them to one length"
                )
            column.width = int(width)
            column.gaps += values.flatten().null_count
        if column.kind == "text":
            column.texts.update(text for text in compute.unique(values).to_pylist() if text is not None)
            if len(column.texts) > _MOST_TEXTS or any(len(text) > _TEXT_BYTES for text in column.texts):
                numbers = sum(map(is_number, column.texts))
                column.kind = "mixed" if len(column.texts) // 2 < numbers < len(column.texts) else "prose"
                column.texts.clear()

    def first_unlike(self, name: str) -> tuple[int, str] | None:
        """Return the first row, and its text, that is a number where those before are none, or the reverse."""
        compute, was_number = self.arrow.compute, None
        for first, batch in self._batches([name], 0):
            values = batch.column(0).cast(self.arrow.string())
            for text in compute.unique(values.drop_null()).to_pylist():
                if was_number not in (None, is_number(text)):
                    return first + compute.index(values, text).as_py(), text
                was_number = is_number(text)
        return None

    def _values(self, batch: Any, wanted: Field) -> np.ndarray:
        values = batch.column(batch.schema.get_field_index(self._names[wanted.name]))
        if wanted.class_names is not None:
            text = self.arrow.string()
            values = self.arrow.compute.index_in(
                values.cast(text), value_set=self.arrow.array(wanted.class_names, text)
            )
        if wanted.shape:
            values = values.flatten()
        array = np.asarray(values.to_numpy(zero_copy_only=False)).astype(wanted.dtype, copy=False)
        return array.reshape(batch.num_rows, *wanted.shape)


@contextlib.contextmanager
def arrow_errors(label: str) -> Iterator[None]:
    """Turn what pyarrow raises into a `DataError`."""
    import pyarrow

    try:
        yield
    except DataError:
        raise
    except (
        pyarrow.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError, EOFError, zlib.error
    ) as error:  # fmt: skip
        raise DataError(f"{label}: cannot be read: {_reason(str(error))}") from error


def _reason(text: str) -> str:
    text = one_line(text, 400)
    if "Expected" in text and "columns, got" in text:
        return (
            f"{text}; every row needs as many values as the first; mend the row, or name the separator with delimiter"
        )
    if "straddling object" in text or "block_size" in text:
        return f"a row is longer than {BLOCK_BYTES:,} bytes, or a quote is never closed ({text})"
    if "codec can't decode" in text or "UTF8" in text:
        return f"{NOT_UTF8} ({text})"
    if "Empty CSV" in text:
        return "the file is empty"
    return text


def agree(sources: Sequence[TableSource], as_text: Sequence[str]) -> None:
    """Settle one type for each column over all files.

    Raises:
        DataError: they hold different things, or what cannot be made numbers.
    """
    agreed: dict[str, Column] = {}
    for name in sources[0].columns:
        found = [source.columns[name] for source in sources]
        kinds = {column.kind for column in found} - {"null"}
        where = f"{sources[0].label if len(sources) == 1 else f'the {len(sources)} tables'}: column {shown(name)}"
        if not kinds:
            raise DataError(f"{where} is empty; leave it out with drop")
        if len(kinds) > 1 and kinds != {"int", "float"}:
            one, other = sorted(kinds)[:2]
            raise DataError(
                f"{where} mixes types: {one} in one file and {other} in another; mend it, or leave it out with drop"
            )
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
        _check(agreed[name], where, name in as_text, functools.partial(_unlike, sources, name))
    for source in sources:
        source.settle(agreed)


def _unlike(sources: Sequence[TableSource], name: str) -> str:
    """Return what first differs in a column from what it begins with, and where."""
    for source in sources:
        with arrow_errors(source.label):
            found = source.first_unlike(name)
        if found is not None:
            of = f" of {source.label}" if len(sources) > 1 else ""
            return f"what differs comes first in row {found[0]:,}{of}, counted from 0: {shown(found[1], 40)}"
    return "in one file and in another"


def _check(column: Column, where: str, as_text: bool, unlike: Callable[[], str]) -> None:
    """Refuse what cannot be numbers."""
    if column.kind == "mixed" and not as_text:
        raise DataError(f"{where} mixes types, and most of it is numbers; {unlike()}; {MIXED}")
    if column.kind in ("prose", "mixed"):
        raise DataError(
            f"{where} holds more than {_MOST_TEXTS:,} different texts, or very long ones; leave it out with drop, or "
            "encode it as numbers"
        )
    if column.kind in ("text", "bool") and column.gaps:
        raise DataError(f"{where} has {column.gaps:,} gaps among its values; fill them, or leave it out with drop")
    if column.kind == "int" and column.gaps:
        column.kind, column.dtype = "float", "<f8"
    if column.kind == "text" and not as_text:
        numbers = [text for text in column.texts if is_number(text)]
        if numbers and len(numbers) < len(column.texts):
            other = min(column.texts - set(numbers))
            raise DataError(
                f"{where} mixes types: numbers such as {shown(min(numbers), 40)} and texts such as {shown(other, 40)}; "
                f"{unlike()}; {MIXED}"
            )


def is_number(text: str) -> bool:
    """Return whether a text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


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
