"""Results go to JSON and come back the same; what is no such result is refused by the field's name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from kerasmem.errors import InputError
from kerasmem.records import Record, json_field


@dataclass(frozen=True)
class Part:
    class_name: str = json_field("class")
    shape: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Whole(Record, what="whole", version=1, also=("count",)):
    parts: tuple[Part, ...]
    share: float
    best: Part | None = None
    value: int | float | str | None = None
    by_class: dict[int, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.parts)


WHOLE = Whole((Part("Dense", (None, 3)), Part("Flatten")), 1.0, Part("ReLU"), "text", {3: 0.5})


def test_there_and_back():
    data = WHOLE.to_dict()
    assert data["format_version"] == 1
    assert data["parts"][0] == {"class": "Dense", "shape": [None, 3]}
    assert data["count"] == 2
    assert Whole.from_dict(json.loads(json.dumps(data))) == WHOLE


def test_missing_fields_take_their_defaults_and_unknown_ones_are_passed_over():
    assert Whole.from_dict({"format_version": 1, "parts": [], "share": 1, "new": 3}) == Whole((), 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"share": "much"}, "share"),
        ({"share": True}, "share"),
        ({"parts": [{"shape": None}]}, "class"),
        ({"parts": 3}, "parts"),
        ({"best": {"class": 3}}, "best"),
        ({"format_version": 2}, "format_version must be 1; got 2"),
    ],
)
def test_what_is_no_such_record_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        Whole.from_dict({**WHOLE.to_dict(), **change})


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_other_data_is_refused(data):
    with pytest.raises(InputError):
        Whole.from_dict(data)
