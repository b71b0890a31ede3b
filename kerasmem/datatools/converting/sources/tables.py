"""Tables as sources: the type of every column settled over all files, texts as numbers of classes."""

from __future__ import annotations

import contextlib
import functools
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from kerasmem.datatools.converting.fields import Field, Rows, check_name
from kerasmem.datatools.converting.settings import ReadOptions
from kerasmem.datatools.converting.sources.csv_text import BLOCK_BYTES, NOT_UTF8
from kerasmem.datatools.converting.sources.row_source import RowSource
from kerasmem.errors import DataError, MissingExtraError, UsageError
from kerasmem.hdf5.layout import one_line, shown

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
