"""The printed tables, read back: every row is there, nothing is cut, and the rows add up to the total."""

from __future__ import annotations

import csv
import functools
import io
import re
from dataclasses import replace

import keras
import pytest
from rich.console import Console

from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.report import Bytes, DeviceVerdict, Instant, Pool
from kerasmem.rendering.estimate_tables import estimate_table, layers_to_csv
from kerasmem.rendering.formatting import plain_text, spreadsheet_cell
from kerasmem.units import format_size


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


@pytest.mark.parametrize(("method", "mode"), [("formula", "train"), ("formula", "inference"), ("graph", "train")])
def test_rows_of_the_printed_table_add_up(mode, method):
    report = estimate(nested_model(), batch_size=5, mode=mode, method=method)
    elements = report.formula.activation_elements_per_sample
    for top in (None, 1, 3):
        *rows, total = read_table(plain_text(estimate_table(report, top=top, is_brief=False)))
        counts = [row[-4:-2] for row in rows]  # parameters, activations
        assert sum(number(row[0]) for row in counts) == number(total[-4]) == report.model.parameters
        assert sum(number(row[1]) for row in counts) == number(total[-3]) == elements
        shares = [float(row[-1].rstrip(" %")) for row in rows if row[-1] != "–"]
        assert sum(shares) == pytest.approx(100, abs=0.05 * len(rows))
        if top:
            assert shares[0] == max(shares[:top])
        unattributed = method == "graph"  # a row for memory of no single layer
        assert len(rows) == (top + 1 if top else len(report.layers)) + unattributed


@pytest.fixture(scope="module")
def reports():
    """Reports of one convnet, each estimated once."""
    layers = keras.layers
    stack = [layers.Conv2D(32, 5, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(64, 5, activation="relu")]
    stack += [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(1024, activation="relu"), layers.Dense(10)]
    model = keras.Sequential([keras.Input((28, 28, 1)), *stack], name="mnist_cnn")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return functools.cache(lambda method, batch_size: estimate(model, method=method, batch_size=batch_size))


def test_parts_that_are_not_known_are_one(reports):
    report = reports("graph", 32)
    assert f"optimizer {format_size(report.bytes.optimizer)}" in plain_text(estimate_table(report))
    unknown = replace(report, bytes=replace(report.bytes, activations=None, gradients=None))
    rest = format_size((report.bytes.activations or 0) + (report.bytes.gradients or 0))
    assert f"not divided further {rest}" in plain_text(estimate_table(unknown))


def made_up(reports, **changes):
    """A report with every figure that any method gives."""
    report = reports("graph", 32)
    return replace(
        report,
        pool=Pool(10 * 2**20, 20 * 2**20, 30 * 2**20, 50 * 2**20),
        instant=Instant("while computing the gradient of block1_conv2\x1b[2J", "op", "block1_conv2", "backward"),
        **changes,
    )


def test_all_that_is_known_is_shown_and_escaped(reports):
    report = made_up(reports, device=DeviceVerdict("card\x1b[2J", 300, 100, "fits"))
    text = plain_text(estimate_table(report, is_brief=False))
    assert "fits card\\x1b[2J: needs" in text and "block1_conv2\\x1b[2J" in text
    for fact in ("Interval", "10.0 MiB of it", "30.0 MiB taken", "50.0 MiB is the smallest", "of all layers together"):
        assert fact in text, fact


def test_a_measurement_has_no_bytes_by_layer(reports):
    report = reports("graph", 32)
    measured = replace(
        report,
        layers=tuple(replace(row, bytes=None, bytes_at_peak=None) for row in report.layers),
        settings=replace(report.settings, method="measure"),
    )
    text = plain_text(estimate_table(measured))
    assert "At peak" not in text and "no single layer" not in text and "Activations" in text


def test_names_cannot_steer_the_terminal_or_the_markup():
    name = "[bold red]x[]\x1b[2J\u202e:smile:"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name=name)])
    report = estimate(model, method="formula")
    text = plain_text(estimate_table(report))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold red]x[]\\x1b[2J\\u202e:smile: (Dense)" in text
    buffer = io.StringIO()
    console = Console(file=buffer, width=200, force_terminal=True, color_system=None)
    console.print(estimate_table(report, console.width))
    assert "\x1b[2J" not in buffer.getvalue()


def test_a_name_cannot_be_a_spreadsheet_formula():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="=cmd|' '!A0")])
    (_, row) = csv.DictReader(io.StringIO(layers_to_csv(estimate(model, method="formula"))))
    assert row["name"] == "'=cmd|' '!A0"
    for text in ("+1", "-1", "@x", "=1"):
        assert spreadsheet_cell(text) == "'" + text


@pytest.mark.parametrize("method", ["formula", "graph"])
def test_csv_adds_up(reports, method):
    report = reports(method, 32)
    rows = list(csv.DictReader(io.StringIO(layers_to_csv(report))))
    assert sum(int(row["bytes"]) for row in rows) == report.bytes.total
    assert rows[1]["output_shape"] == "x24x24x32"
    assert rows[-1]["kind"] == ("layer" if method == "formula" else "rest")


def test_a_lower_end_that_is_not_known_is_not_shown(reports):
    """XLA's plan for this machine in a card's place: all that is sure is what the step holds from beginning to end."""
    gib = 2**30
    report = replace(
        reports("graph", 32),
        bytes=Bytes(3 * gib, gib // 3, 3 * gib + gib // 10),
        device=DeviceVerdict("t4", 16 * gib, 2 * gib, "too close to call"),
    )
    report = replace(report, settings=replace(report.settings, method="xla", execution="xla", stands_in=True))
    text = plain_text(estimate_table(report, is_brief=False))
    assert "at most 3.10 GiB; the card's own plan may take less" in text
    assert "341 MiB" not in text and "(planned for this CPU" in text.splitlines()[0]
    planned = replace(report, settings=replace(report.settings, stands_in=False))
    assert "(planned for this CPU" not in plain_text(estimate_table(planned))
    assert "341 MiB to 3.10 GiB" in plain_text(estimate_table(planned, is_brief=False))
    assert report.to_dict()["bytes"]["low"] == gib // 3


def test_the_first_line_says_that_the_formula_answers_in_place_of_a_method(reports):
    report = replace(reports("formula", 32), fallback="graph has no answer: no rule for it")
    assert (
        "(by the formula alone, as graph has no answer: no rule for it)"
        in plain_text(estimate_table(report)).split("\n")[0]
    )
