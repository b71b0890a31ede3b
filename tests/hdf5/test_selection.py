"""The `rows` setting."""

from __future__ import annotations

import numpy as np
import pytest

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.columns import read_rows


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, range(10)),
        (slice(None), range(10)),
        (slice(2, None), range(2, 10)),
        ((2, 5), range(2, 5)),
        ((None, 5), range(5)),
        (range(3, 6), range(3, 6)),
        ([4, 5, 6], range(4, 7)),
        ([6, 4, 5], range(4, 7)),
        (np.array([7], np.uint8), range(7, 8)),
    ],
)
def test_runs(given, wanted):
    assert read_rows(given, 10, ordered=False) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(slice(0, 10, 3), [0, 3, 6, 9]), (range(1, 10, 4), [1, 5, 9]), ([9, 0, 4], [0, 4, 9])],
)
def test_scattered(given, wanted):
    rows = read_rows(given, 10, ordered=False)
    assert rows.dtype == np.int64
    assert rows.tolist() == wanted


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([1, 1], DataError, "row 1 is named more than once"),
        ([3, 1, 3], DataError, "row 3 is named more than once"),
        ([-1], DataError, "-1 is negative"),
        ([10], DataError, "10 is past the end; the file has 10 rows"),
        ([], DataError, "empty"),
        ((3, 3), DataError, "selects no rows"),
        (range(0), DataError, "selects no rows"),
        ((0, 11), DataError, "10 is past the end"),
        (slice(-3, None), DataError, "-3 is negative"),
        (range(-2, 3), DataError, "-2 is negative"),
        (range(5, 12), DataError, "11 is past the end"),
        (slice(0, 5, -1), UsageError, "at least 1; got -1"),
        ((1, 2, 3), UsageError, r"\(start, stop\)"),
        ((0, 2.5), UsageError, "must be a whole number; got 2.5"),
        ([1.5], UsageError, "array of row numbers"),
        (np.array([True] * 10), UsageError, "flatnonzero"),
        ([[1, 2]], UsageError, "flat array"),
        ("train", UsageError, "rows"),
        (7, UsageError, "rows"),
    ],
)
def test_refused(given, error, text):
    with pytest.raises(error, match=text):
        read_rows(given, 10, ordered=False)


def test_file_order_needs_sorted_rows():
    assert read_rows([1, 5], 10, ordered=True).tolist() == [1, 5]
    with pytest.raises(UsageError, match=r"numpy.sort"):
        read_rows([5, 1], 10, ordered=True)
    with pytest.raises(UsageError, match="must be increasing"):
        read_rows(range(5, 1, -1), 10, ordered=True)
