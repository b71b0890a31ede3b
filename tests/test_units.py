from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasmem.errors import UsageError
from kerasmem.units import format_size, is_size, parse_size, printable


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("123", 123), (77, 77), ("1k", 1024), ("1K", 1024), ("1kB", 1000), ("1KiB", 1024),
        ("512MB", 512 * 10**6), ("16GiB", 2**34), ("16GB", 16 * 10**9), ("16G", 2**34), ("1.5GiB", 3 * 2**29),
        (".5M", 2**19), (" 2 tb ", 2 * 10**12),
        ("1_000_000", 10**6), ("1,000,000", 10**6), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_parses(text, count):
    assert parse_size(text) == count
    assert isinstance(text, int) or is_size(text)


@pytest.mark.parametrize("text", ["", "GB", "16XB", "1e9", "-5", "16 G B", "1,00", "١٢", "nan", "0x10", "t4", "12\n34"])
def test_refuses(text):
    with pytest.raises(UsageError, match="budget"):
        parse_size(text, field="budget")
    assert not is_size(text)


@pytest.mark.parametrize("value", [-1, True, 1.5, None])
def test_refuses_other_types(value):
    with pytest.raises(UsageError, match="budget"):
        parse_size(value, field="budget")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (8_895_568, "8.48 MiB"), (239_824, "234 KiB"),
        (10 * 2**20 - 1, "10.0 MiB"), (2**30 - 1, "1.00 GiB"), (999 * 2**20, "999 MiB"), (1000 * 2**20, "0.98 GiB"),
        (2**34, "16.0 GiB"), (5 * 2**60, "5120 PiB"), (-2048, "-2.00 KiB"), (None, "?"),
    ],
)  # fmt: skip
def test_formats(count, text):
    assert format_size(count) == text


@given(st.integers(0, 2**70))
def test_a_formatted_size_parses_back_to_three_digits(count):
    text = format_size(count)
    if not text.endswith("PiB"):  # sizes are written for people; nobody types pebibytes
        assert parse_size(text) == pytest.approx(count, rel=0.006)


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_refused(text):
    if is_size(text):
        assert parse_size(text) >= 0
    else:
        with pytest.raises(UsageError, match="budget"):
            parse_size(text, field="budget")


@given(st.text())
def test_printable_text_cannot_steer_a_terminal(text):
    assert not set(printable(text)) & set("\x1b\x07\b\r\n\u202e\u2028\0")
    assert len(printable(text, 10)) <= 10
