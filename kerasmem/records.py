"""Results as JSON, pandas frames and notebook tables.

A result is a frozen dataclass that inherits from `Record`. cattrs reads and writes its fields by their type hints:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Span(Record, what="span"):
    ...     label: str
    ...     shape: tuple[int | None, ...] | None = None
    >>> Span.from_dict(Span("load", (None, 3)).to_dict())
    Span(label='load', shape=(None, 3))

Missing fields take their defaults and unknown fields are ignored, so files of older and newer versions can be read. A
value of the wrong type is an `InputError` with the field's name.

A result for users declares its `rows` and has an `answer` of one line. `print` shows the answer, a notebook shows a
table, and `to_frame` returns a pandas frame.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

from kerasmem.errors import InputError, UsageError, check_format
from kerasmem.units import format_size, printable

if TYPE_CHECKING:
    from cattrs import Converter
    from typing_extensions import Self


MOST_ROWS = 25  # in a notebook
_SIZES = ("total", "low", "high", "before", "needs")  # sizes without "bytes" in their name


def json_field(json: str, default: Any = MISSING) -> Any:
    """Declare a field that has another name in JSON, such as `class`."""
    return field(default=default, metadata={"json": json})


class Record:
    """Base class of results: frozen dataclasses that can be written as JSON.

    Class arguments:
        what: its noun in messages, such as "report".
        version: its `format_version`, for a record with its own file format.
        also: properties to write to JSON in addition to the fields.
        rows: the field with the rows of its table, for a result that has an `answer`.
    """

    _what: ClassVar[str] = "record"
    _version: ClassVar[int | None] = None
    _also: ClassVar[tuple[str, ...]] = ()
    _rows: ClassVar[str | None] = None

    def __init_subclass__(
        cls, what: str = "record", version: int | None = None, also: tuple[str, ...] = (), rows: str | None = None
    ) -> None:
        cls._what, cls._version, cls._also, cls._rows = what, version, also, rows
        if rows is not None:  # takes precedence over the dataclass's
            cls.__repr__ = _one_line  # type: ignore[method-assign, assignment]
            cls.__str__ = _answer  # type: ignore[method-assign]

    def to_frame(self) -> Any:
        """Return the rows, or else all fields as one row, as a `pandas.DataFrame` with sizes in bytes.

        Raises:
            UsageError: If pandas is not installed.
        """
        return frame_of(self._table())

    def _repr_html_(self) -> str:
        return html_table(str(self), self._table())

    def _table(self) -> list[dict[str, Any]]:
        rows: Any = (self,) if self._rows is None else getattr(self, self._rows)
        return [{one.name: getattr(row, one.name) for one in fields(row)} for row in rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary for JSON, with sizes in bytes."""
        data: dict[str, Any] = _converter().unstructure(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create a record from the dictionary of `to_dict`.

        Raises:
            InputError: If the data is not such a record, or has another format version.
        """
        if cls._version is not None:
            check_format(cls._what, data, cls._version)
        try:
            return _converter().structure(data, cls)
        except Exception as error:
            from cattrs import transform_error

            reason = "; ".join(transform_error(error))[:300]
            raise InputError(f"{cls._what}: not a kerasmem {cls._what} ({reason})") from error


def _answer(record: Any) -> str:
    return printable(record.answer)


def _one_line(record: Record) -> str:
    return f"<{type(record).__name__}: {record}>"


def frame_of(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return rows as a `pandas.DataFrame`.

    Raises:
        UsageError: If pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("to_frame needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))


def html_table(title: str, rows: Sequence[Mapping[str, Any]], count: int | None = None) -> str:
    """Format a title and at most 25 rows as HTML, with sizes in units and without empty columns.

    Args:
        title: one line.
        rows: dictionaries with the same keys.
        count: number of all rows, if `rows` has only the first.
    """
    left = (len(rows) if count is None else count) - MOST_ROWS
    texts = [{name: _cell(name, value) for name, value in row.items()} for row in rows[:MOST_ROWS]]
    names = [name for name in (texts[0] if texts else ()) if any(row[name] for row in texts)]
    lines = ["".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in names)]
    lines += ["".join(f"<td>{html.escape(row[name])}</td>" for name in names) for row in texts]
    more = f"<p>{left:,} more rows: to_frame()</p>" if left > 0 else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<p><b>{html.escape(title)}</b></p><table>{body}</table>{more}"


def _cell(name: str, value: Any) -> str:
    """Format a value, or return "" for None, dictionaries and texts of several lines."""
    if isinstance(value, (tuple, list)):
        is_shape = all(isinstance(item, int) for item in value)
        return printable(("×" if is_shape else ", ").join(map(str, value)))
    if value is None or isinstance(value, Mapping) or (isinstance(value, str) and "\n" in value):
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return format_size(value) if "bytes" in name or name in _SIZES else f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value), 200)


@functools.cache
def _converter() -> Converter:
    from cattrs import Converter, gen
    from cattrs.strategies import configure_union_passthrough

    converter = Converter(unstruct_collection_overrides={tuple: list, set: list, frozenset: list})
    for kind, accepted in ((int, (int,)), (float, (float, int)), (str, (str,)), (bool, (bool,))):
        converter.register_structure_hook(kind, functools.partial(_read_plain, accepted))
    configure_union_passthrough(int | float | str | bool | None, converter)
    converter.register_structure_hook_func(_has_whole_keys, functools.partial(_read_whole_keys, converter))
    converter.register_structure_hook_factory(
        is_dataclass, lambda cls: gen.make_dict_structure_fn(cls, converter, **_renames(cls))
    )
    converter.register_unstructure_hook_factory(is_dataclass, lambda cls: _writer(cls, converter))
    return converter


def _read_plain(accepted: tuple[type, ...], value: Any, kind: Any) -> Any:
    if (type(value) is bool and kind is not bool) or not isinstance(value, accepted):
        raise TypeError(f"{value!r:.60} is not {kind.__name__}")
    return kind(value)


def _has_whole_keys(kind: Any) -> bool:
    return get_origin(kind) in (dict, Mapping) and get_args(kind)[0] is int


def _read_whole_keys(converter: Converter, data: Any, kind: Any) -> dict[int, Any]:
    """Read a dictionary whose integer keys JSON stored as text."""
    return {int(key): converter.structure(value, get_args(kind)[1]) for key, value in data.items()}


def _renames(cls: Any) -> dict[str, Any]:
    from cattrs import override

    return {one.name: override(rename=one.metadata["json"]) for one in fields(cls) if "json" in one.metadata}


def _writer(cls: Any, converter: Converter) -> Any:
    from cattrs.gen import make_dict_unstructure_fn

    write = make_dict_unstructure_fn(cls, converter, **_renames(cls))
    if not issubclass(cls, Record):
        return write
    version = {} if cls._version is None else {"format_version": cls._version}

    def write_all(record: Any) -> dict[str, Any]:
        properties = {name: converter.unstructure(getattr(record, name)) for name in cls._also}
        return {**version, **write(record), **properties}

    return write_all
