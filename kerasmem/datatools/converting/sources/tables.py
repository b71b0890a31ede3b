"""Tables as sources: the type of every column settled over all files, texts as numbers of classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kerasmem.datatools.converting.fields import Field, Piece, check_name
from kerasmem.datatools.converting.sources.protocol import RowSource
from kerasmem.datatools.converting.sources.table_files import (
    CsvFile,
    ParquetFile,
    TableFile,
    TableOptions,
    arrow_errors,
    is_number,
)
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import shown

_MOST_TEXTS = 1 << 16  # different ones in a column
_TEXT_BYTES = 1 << 16  # of one of them


@dataclass
class _Column:
    """What a column turns out to hold."""

    kind: str  # int, uint, float, bool, text, null
    dtype: str = ""
    width: int | None = None  # of lists
    gaps: int = 0
    texts: set[str] = field(default_factory=set)


def open_tables(paths: Sequence[str], options: TableOptions) -> list[TableSource]:
    """Return a source a file, those with the same columns agreed on their types.

    Raises:
        DataError: a file cannot be read, or its columns cannot be made numbers.
    """
    groups: dict[frozenset[str], list[TableSource]] = {}
    for path in paths:
        kind = ParquetFile if path.lower().endswith((".parquet", ".pq")) else CsvFile
        source = TableSource(kind(path, options))
        groups.setdefault(frozenset(source.columns), []).append(source)
    for group in groups.values():
        _agree(group, options.text)
    return [source for group in groups.values() for source in group]


class TableSource(RowSource):
    """One CSV or Parquet file; its columns get their types from `settle`."""

    def __init__(self, file: TableFile) -> None:
        super().__init__(file.label, file.path)
        self._file = file
        self.rows = 0
        self.fields = ()
        self.columns: dict[str, _Column] = {}
        self._names: dict[str, str] = {}
        if not file.types:
            raise UsageError(f"drop: no column of {self.label} is left to be written")
        with arrow_errors(self.label):
            self._survey()

    def settle(self, columns: dict[str, _Column]) -> None:
        """Take over the types that all files agree on."""
        self.columns = columns
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
        if isinstance(self._file, CsvFile):  # from now on its columns are read as these types
            arrow = self._file.pyarrow
            types = {"int": arrow.int64(), "float": arrow.float64(), "text": arrow.string(), "bool": arrow.bool_()}
            self._file.types = {original: types[column.kind] for original, column in columns.items()}

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows."""
        wanted = [f for f in self.fields if names is None or f.name in names]
        for batch in self._file.batches([self._names[f.name] for f in wanted], start):
            for first in range(0, batch.num_rows, rows):
                part = batch.slice(first, rows)
                yield {f.name: self._values(part, f) for f in wanted}

    def _survey(self) -> None:
        found: dict[str, _Column] = {}
        for batch in self._file.survey_batches():
            if batch is None:  # a type was widened: from the beginning
                found, self.rows = {}, 0
                continue
            self.rows += batch.num_rows
            for name, values in zip(batch.schema.names, batch.columns, strict=True):
                if name not in found:
                    found[name] = self._column(name, values.type)
                self._add(name, values, found[name])
        if isinstance(self._file, ParquetFile):
            self.rows = self._file.rows
        if not self.rows:
            raise DataError(f"{self.label}: has a header and no rows")
        self.columns = {name: found.get(name) or self._column(name, kind) for name, kind in self._file.types.items()}

    def _column(self, name: str, kind: Any) -> _Column:
        types = self._file.pyarrow.types
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
            return _Column("null")
        if types.is_boolean(kind):
            return _Column("bool", "|b1")
        if types.is_integer(kind) or types.is_floating(kind):
            dtype = np.dtype(kind.to_pandas_dtype()).str
            return _Column("float" if types.is_floating(kind) else "int", dtype)
        if types.is_string(kind) or types.is_large_string(kind):
            return _Column("text")
        what = "dates or times" if types.is_temporal(kind) else f"the type {kind}"
        raise DataError(
            f"{self.label}: column {shown(name)} holds {what}, no numbers; convert it, or leave it out with drop"
        )

    def _add(self, name: str, values: Any, column: _Column) -> None:
        import pyarrow.compute as compute

        column.gaps += values.null_count
        if column.width is not None:
            lengths = compute.min_max(compute.list_value_length(values)).as_py()
            width = lengths["max"] if column.width == -1 else column.width
            if values.null_count or lengths["min"] != width or lengths["max"] != width:
                raise DataError(
                    f"{self.label}: column {shown(name)} is ragged: lists of {lengths['min']} to {lengths['max']} "
                    "values; pad them to one length"
                )
            column.width = int(width)
            column.gaps += values.flatten().null_count
        if column.kind == "text":
            column.texts.update(text for text in compute.unique(values).to_pylist() if text is not None)
            if len(column.texts) > _MOST_TEXTS or any(len(text) > _TEXT_BYTES for text in column.texts):
                column.texts.clear()
                column.kind = "prose"

    def _values(self, batch: Any, wanted: Field) -> np.ndarray:
        import pyarrow.compute as compute

        values = batch.column(batch.schema.get_field_index(self._names[wanted.name]))
        if wanted.class_names is not None:
            text = self._file.pyarrow.string()
            known = self._file.pyarrow.array(wanted.class_names, text)
            codes = compute.index_in(values.cast(text), value_set=known)
            return np.asarray(codes.to_numpy(zero_copy_only=False)).astype(np.int32)
        if wanted.shape:
            values = values.flatten()
        array = np.asarray(values.to_numpy(zero_copy_only=False)).astype(wanted.dtype, copy=False)
        return array.reshape(batch.num_rows, *wanted.shape)


def _agree(sources: Sequence[TableSource], as_text: Sequence[str]) -> None:
    """Settle one type for each column over all files."""
    agreed: dict[str, _Column] = {}
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
        total = _Column(
            max(kinds, key="int float".find), width=found[0].width, gaps=sum(column.gaps for column in found)
        )
        dtypes = [np.dtype(column.dtype) for column in found if column.dtype]
        total.dtype = np.result_type(*dtypes).newbyteorder("<").str if dtypes else ""
        for column in found:
            total.texts |= column.texts
        _check(total, where, name in as_text)
        agreed[name] = total
    for source in sources:
        source.settle(agreed)


def _check(column: _Column, where: str, as_text: bool) -> None:
    """Refuse what cannot be numbers."""
    if column.kind == "prose":
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
                "mend it, leave the column out with drop, or read it as text with text"
            )
