"""Plain arguments are checked once: what is right comes back as a plain type, all else is named."""

from __future__ import annotations

import numpy as np
import pytest

from kerasmem import checks
from kerasmem.errors import UsageError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole(value):
    assert type(checks.whole("steps", value)) is int


@pytest.mark.parametrize(
    ("value", "words"),
    [(True, "steps: True is not a whole number"), (3.0, "3.0"), ("3", "'3'"), (0, "too small; it must be 1 or more")],
)
def test_what_is_not_whole(value, words):
    with pytest.raises(UsageError, match=words):
        checks.whole("steps", value)


def test_choices_name_the_nearest():
    assert checks.choice("method", "graph", ("graph", "xla")) == "graph"
    with pytest.raises(UsageError, match="did you mean 'graph'"):
        checks.choice("method", "grahp", ("graph", "xla"))
    with pytest.raises(UsageError):
        checks.choice("verbose", True, (0, 1))


@pytest.mark.parametrize("value", [3, b"x", "", "a\0b", "\ud800", None])
def test_what_is_no_path(value):
    with pytest.raises(UsageError, match="file"):
        checks.path("file", value)
