"""The printed tables, read back: every row is there, nothing is cut, and the rows add up to the total."""

from __future__ import annotations

import csv
import io
import re

import keras
import pytest
from rich.console import Console

from kerasmem.estimation.facade import estimate
from kerasmem.rendering.data import layers_to_csv
from kerasmem.rendering.escape import printable, spreadsheet_cell
from kerasmem.rendering.estimate_table import print_report, render_report


def nested_model():
    tower_in = keras.Input((16, 16, 3))
    x = keras.layers.Conv2D(4, 3)(tower_in)
    tower = keras.Model(tower_in, keras.layers.Flatten()(x), name="tower")
    a, b = keras.Input((16, 16, 3), name="a"), keras.Input((16, 16, 3), name="b")
    joined = keras.layers.Concatenate()([tower(a), tower(b)])
    return keras.Model([a, b], keras.layers.Dense(7)(joined))


def read_table(text):
    """The columns of a plain table, cut where its header cuts them."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Layer (class)"))
    rows = []
    for line in lines[start + 1 :]:
        cells = re.split(r" {2,}", line.strip())
        rows.append(cells)
        if cells[0] == "Total":
            return rows
    raise AssertionError("no total line")


def number(cell):
    return 0 if cell in ("view", "?") else int(cell.replace(",", ""))


@pytest.mark.parametrize("options", [{}, {"sort": "size"}, {"top": 3}, {"top": 1, "sort": "size"}])
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_rows_of_the_printed_table_add_up(options, mode):
    report = estimate(nested_model(), batch_size=5, mode=mode)
    *rows, total = read_table(render_report(report, **options))
    counts = [row[-5:-2] for row in rows]  # parameters, activations, bytes
    assert sum(number(row[0]) for row in counts) == number(total[-5]) == report.model.parameters
    assert sum(number(row[1]) for row in counts) == number(total[-4]) == report.formula.activation_elements_per_sample
    assert sum(number(row[2]) for row in counts) == number(total[-3]) == report.bytes.total
    shares = [float(row[-1].rstrip(" %")) for row in rows if row[-1] != "–"]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(rows))
    assert len(rows) == (options["top"] + 1 if "top" in options else len(report.layers))


def test_the_reading_test_can_fail():
    text = render_report(estimate(nested_model(), batch_size=5))
    broken = text.replace(re.search(r"dense.*?\)\s+\(None, 7\)\s+([\d,]+)", text)[1], "1", 1)
    *rows, total = read_table(broken)
    assert sum(number(row[-5]) for row in rows) != number(total[-5])


def test_largest_first():
    *rows, _ = read_table(render_report(estimate(nested_model()), sort="size"))
    sizes = [number(row[-3]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_the_formula_is_spelled_out(mnist_cnn):
    text = render_report(estimate(mnist_cnn, batch_size=32, device="16GB"))
    assert re.search(r"1,111,946 × 2 × 4 B +=  +8,895,568 B", text)
    assert re.search(r"32 × 29,978 × 2 × 4 B +=  +7,674,368 B", text)
    assert "16,569,936 B" in text
    assert text.rstrip().endswith("16GB: 14.9 GiB, of which TensorFlow can use 14.9 GiB: fits")


@pytest.mark.parametrize("batch_size", [32, 30_000])
@pytest.mark.parametrize("width", [48, 60, 76, 80, 100, 120, 200])
def test_on_a_terminal_of_any_width_figures_are_whole(mnist_cnn, width, batch_size):
    report = estimate(mnist_cnn, batch_size=batch_size)
    buffer = io.StringIO()
    print_report(report, Console(file=buffer, width=width, force_terminal=True, color_system=None))
    text = buffer.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    for row in report.layers:
        assert f"{row.parameters:,}" in text
        assert row.kind == "view" or f"{row.activation_elements:,}" in text
    assert "1,111,946" in text
    assert "29,978" in text
    assert f"{report.formula.total_bytes:,} B" in " ".join(text.split())
    assert "…" not in text


def test_names_cannot_steer_the_terminal_or_the_markup():
    name = "[bold red]x[]\x1b[2J\u202e:smile:"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name=name)])
    text = render_report(estimate(model))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold red]x[]\\x1b[2J\\u202e:smile: (Dense)" in text
    buffer = io.StringIO()
    console = Console(file=buffer, width=200, force_terminal=True, color_system=None)
    print_report(estimate(model), console)
    assert "\x1b[2J" not in buffer.getvalue()


def test_a_name_cannot_be_a_spreadsheet_formula():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="=cmd|' '!A0")])
    (_, row) = csv.DictReader(io.StringIO(layers_to_csv(estimate(model))))
    assert row["name"] == "'=cmd|' '!A0"
    for text in ("+1", "-1", "@x", "=1"):
        assert spreadsheet_cell(text) == "'" + text


def test_csv_adds_up(mnist_cnn):
    report = estimate(mnist_cnn)
    rows = list(csv.DictReader(io.StringIO(layers_to_csv(report))))
    assert sum(int(row["bytes"]) for row in rows) == report.bytes.total
    assert rows[1]["output_shape"] == "x24x24x32"


def test_printable_cuts_and_escapes():
    assert printable("a\nb\tc\u2028d") == "a\\nb\\tc\\u2028d"
    assert printable("x" * 50, 10) == "x" * 9 + "…"
    assert printable("ünïcode 層") == "ünïcode 層"
