"""Results to and from JSON: one mechanism for all of them.

A result is a frozen dataclass that inherits from `Record`. cattrs reads and writes the fields by their type hints:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Span(Record, what="span"):
    ...     label: str
    ...     shape: tuple[int | None, ...] | None = None
    >>> Span.from_dict(Span("load", (None, 3)).to_dict())
    Span(label='load', shape=(None, 3))

Fields that are missing take their defaults, and fields that this version does not know are passed over, so that
older and newer files can be read. A value of the wrong type is an `InputError` that names the field.

A result that people look at names the field that has its `rows`, and has an `answer` in one line: `print` shows that, a
notebook a table, and `to_frame` is for pandas.
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


MOST_ROWS = 25  # of a table in a notebook
_SIZES = ("total", "low", "high", "before", "needs")  # names of sizes that do not say "bytes"


def renamed(json: str, default: Any = MISSING) -> Any:
    """Return a field with another name in JSON, such as `class`."""
    return field(default=default, metadata={"json": json})


class Record:
    """A frozen dataclass that JSON can hold.

    Class arguments:
        what: what messages call it: "report".
        version: its `format_version`, for a record that stands in a file of its own.
        also: names of properties that are written to JSON beside the fields, and not read back.
        rows: the field whose records are the rows of its table, for a result that has an `answer`.
    """

    _what: ClassVar[str] = "record"
    _version: ClassVar[int | None] = None
    _also: ClassVar[tuple[str, ...]] = ()
    _rows: ClassVar[str | None] = None

    def __init_subclass__(
        cls, what: str = "record", version: int | None = None, also: tuple[str, ...] = (), rows: str | None = None
    ) -> None:
        cls._what, cls._version, cls._also, cls._rows = what, version, also, rows
        if rows is not None:  # before the dataclass makes one of all fields
            cls.__repr__ = _one_line  # type: ignore[method-assign, assignment]
            cls.__str__ = _answer  # type: ignore[method-assign, assignment]

    @property
    def answer(self) -> str:
        """What was found, in one line."""
        return f"a {self._what}"

    def to_frame(self) -> Any:
        """Return the rows of its table as a `pandas.DataFrame`, sizes in bytes; one of all fields where it has none.

        Raises:
            UsageError: pandas is not installed.
        """
        return frame_of(self._table())

    def _repr_html_(self) -> str:
        return html_table(str(self), self._table())

    def _table(self) -> list[dict[str, Any]]:
        rows: Any = (self,) if self._rows is None else getattr(self, self._rows)
        return [{each.name: getattr(row, each.name) for each in fields(row)} for row in rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-ready data, sizes in integer bytes."""
        data: dict[str, Any] = _converter().unstructure(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave, also after a trip through JSON.

        Raises:
            InputError: it is no such record, or of another format version.
        """
        if cls._version is not None:
            check_format(cls._what, data, cls._version)
        try:
            return _converter().structure(data, cls)
        except Exception as error:
            raise InputError(f"{cls._what}: not a kerasmem {cls._what} ({_reason(error)})") from error


def _answer(record: Record) -> str:
    return printable(record.answer)


def _one_line(record: Record) -> str:
    return f"<{type(record).__name__}: {record}>"


def frame_of(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return rows as a `pandas.DataFrame`.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("to_frame: pandas is not installed: pip install pandas") from error
    return pandas.DataFrame(list(rows))


def html_table(title: str, rows: Sequence[Mapping[str, Any]], count: int | None = None) -> str:
    """Return a title and rows as HTML: sizes in units, no column that says nothing, and at most 25 rows.

    Args:
        title: one line.
        rows: with the same keys each.
        count: of all rows, where these are the first.
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
    """Format a value for a cell; empty if it is unknown or too long."""
    if isinstance(value, (tuple, list)):
        is_shape = all(isinstance(each, int) for each in value)
        return printable(("×" if is_shape else ", ").join(map(str, value)))
    if value is None or isinstance(value, Mapping) or (isinstance(value, str) and "\n" in value):
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return format_size(value) if "bytes" in name or name in _SIZES else f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value), 200)


@functools.cache
def _converter() -> Converter:
    from cattrs import Converter
    from cattrs.strategies import configure_union_passthrough

    converter = Converter(unstruct_collection_overrides={tuple: list, set: list, frozenset: list})
    for kind, accepted in ((int, (int,)), (float, (float, int)), (str, (str,)), (bool, (bool,))):
        converter.register_structure_hook(kind, _strict(kind, accepted))
    configure_union_passthrough(int | float | str | bool | None, converter)
    converter.register_structure_hook_factory(_has_whole_keys, lambda kind: _whole_keyed(kind, converter))
    converter.register_structure_hook_factory(is_dataclass, lambda cls: _reader(cls, converter))
    converter.register_unstructure_hook_factory(is_dataclass, lambda cls: _writer(cls, converter))
    return converter


def _strict(kind: type, accepted: tuple[type, ...]) -> Any:
    def read(value: Any, _: Any) -> Any:
        if (type(value) is bool and kind is not bool) or not isinstance(value, accepted):
            raise TypeError(f"{value!r:.60} is not {kind.__name__}")
        return kind(value)

    return read


def _has_whole_keys(kind: Any) -> bool:
    return get_origin(kind) in (dict, Mapping) and get_args(kind)[0] is int


def _whole_keyed(kind: Any, converter: Converter) -> Any:
    """Read a dictionary whose keys are whole numbers: JSON has them as texts."""
    values = get_args(kind)[1]
    return lambda data, _: {int(key): converter.structure(value, values) for key, value in data.items()}


def _overrides(cls: Any) -> dict[str, Any]:
    from cattrs.gen import override

    return {each.name: override(rename=each.metadata["json"]) for each in fields(cls) if "json" in each.metadata}


def _reader(cls: Any, converter: Converter) -> Any:
    from cattrs.gen import make_dict_structure_fn

    return make_dict_structure_fn(cls, converter, **_overrides(cls))


def _writer(cls: Any, converter: Converter) -> Any:
    from cattrs.gen import make_dict_unstructure_fn

    write = make_dict_unstructure_fn(cls, converter, **_overrides(cls))
    if not issubclass(cls, Record):
        return write
    version, also = cls._version, cls._also

    def write_all(record: Any) -> dict[str, Any]:
        first = {} if version is None else {"format_version": version}
        return {**first, **write(record), **{name: converter.unstructure(getattr(record, name)) for name in also}}

    return write_all


def _reason(error: BaseException) -> str:
    from cattrs import transform_error

    return "; ".join(transform_error(error))[:300]
