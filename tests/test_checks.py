"""Arguments are returned as plain types, or refused with their name."""

from __future__ import annotations

import numpy as np
import pytest

import kerasmem
from kerasmem import checks
from kerasmem.errors import UsageError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole(value):
    assert type(checks.whole("steps", value)) is int


@pytest.mark.parametrize(
    ("value", "words"),
    [(True, "steps must be a whole number .*got True"), (3.0, "3.0"), ("3", "'3'"), (0, "at least 1; got 0")],
)
def test_whole_refuses_other_values(value, words):
    with pytest.raises(UsageError, match=words):
        checks.whole("steps", value)


def test_choice_suggests_the_nearest():
    assert checks.choice("method", "graph", ("graph", "xla")) == "graph"
    with pytest.raises(UsageError, match="did you mean 'graph'"):
        checks.choice("method", "grahp", ("graph", "xla"))
    with pytest.raises(UsageError):
        checks.choice("verbose", True, (0, 1))


@pytest.mark.parametrize("value", [3, b"x", "", "a\0b", "\ud800", None])
def test_path_refuses_other_values(value):
    with pytest.raises(UsageError, match="file"):
        checks.path("file", value)


def test_functions_with_settings_refuse_other_keywords():
    with pytest.raises(TypeError, match=r"^estimate\(\) .*'batchsize'.*did you mean 'batch_size'"):
        kerasmem.estimate("m.h5", batchsize=8)
    with pytest.raises(TypeError, match=r"^convert\(\) .*'headers'.*did you mean 'header'"):
        kerasmem.data.convert("x.csv", "x.h5", headers=False)
