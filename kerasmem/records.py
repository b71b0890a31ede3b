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
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

from kerasmem.errors import InputError, check_format

if TYPE_CHECKING:
    from cattrs import Converter
    from typing_extensions import Self


def renamed(json: str, default: Any = MISSING) -> Any:
    """Return a field that JSON calls by another name, such as `class`, which Python does not allow."""
    return field(default=default, metadata={"json": json})


class Record:
    """A frozen dataclass that JSON can hold.

    Class arguments:
        what: what messages call it: "report".
        version: its `format_version`, for a record that stands in a file of its own.
        also: names of properties that are written to JSON beside the fields, and not read back.
    """

    _what: ClassVar[str] = "record"
    _version: ClassVar[int | None] = None
    _also: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, what: str = "record", version: int | None = None, also: tuple[str, ...] = ()) -> None:
        cls._what, cls._version, cls._also = what, version, also

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
