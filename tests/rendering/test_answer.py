"""The short answer of `kerasmem estimate`: the verdict first, all of it on one screen."""

from __future__ import annotations

import dataclasses
import io

import keras
import pytest
from rich.console import Console

from kerasmem import estimate
from kerasmem.devices.catalogue import resolve_device
from kerasmem.estimation.report import device_verdict, fitting_cards
from kerasmem.rendering.estimate_tables import estimate_table
from kerasmem.rendering.formatting import plain_text


@pytest.fixture(scope="module")
def report():
    layers = [keras.layers.Dense(64, activation="relu") for _ in range(12)]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)], name="deep")
    model.compile("adam", "mse")
    return estimate(model, batch_size=64, method="graph")


def on(report, device, **changed):
    """A report with some bytes changed, and its verdict on a device."""
    need = dataclasses.replace(report.bytes, **changed)
    return dataclasses.replace(report, bytes=need, device=device_verdict(resolve_device(device), need))


GIB = 2**30


@pytest.mark.parametrize(
    ("device", "total", "low", "high", "line"),
    [
        ("16GiB", 3 * GIB, 2 * GIB, 4 * GIB, "✔ fits 16GiB: needs 3.00 GiB, at most 4.00 GiB, of 16.0 GiB"),
        ("2GiB", 4 * GIB, 3 * GIB, 5 * GIB, "✘ does not fit 2GiB: needs 4.00 GiB, at least 3.00 GiB, of 2.00 GiB"),
        ("4GiB", 4 * GIB, 3 * GIB, 5 * GIB,
         "? too close to call on 4GiB: needs 4.00 GiB, at least 3.00 GiB, at most 5.00 GiB, of 4.00 GiB"),
        ("8GiB", 4 * GIB, 3 * GIB, None,
         "? too close to call on 8GiB: needs 4.00 GiB, no upper end known, of 8.00 GiB"),
        ("8GiB", 4 * GIB, 4 * GIB, 4 * GIB, "✔ fits 8GiB: needs 4.00 GiB, of 8.00 GiB"),
        ("t4", 3 * GIB, 2 * GIB, 4 * GIB,
         "✔ fits Tesla T4 16GB: needs 3.00 GiB, at most 4.00 GiB, of 13.4 GiB"),
    ],
)  # fmt: skip
def test_the_first_line_answers(report, device, total, low, high, line):
    assert plain_text(estimate_table(on(report, device, total=total, low=low, high=high))).splitlines()[0] == line


def test_without_a_device_it_says_which_cards_fit(report):
    need = dataclasses.replace(report.bytes, total=30 * GIB, low=29 * GIB, high=31 * GIB)
    cards = fitting_cards(need)
    asked = dataclasses.replace(report, bytes=need)
    first = plain_text(estimate_table(asked, cards=cards)).splitlines()[0]
    assert first == f"needs 30.0 GiB, at most 31.0 GiB: fits {len(cards)} of the known cards, from {cards[0]} up"
    assert 1 < len(cards) < len(fitting_cards(report.bytes))
    assert plain_text(estimate_table(asked)).splitlines()[0].endswith("fits no known card")


@pytest.mark.parametrize("width", [80, 110, 200])
def test_it_fits_a_screen(report, width):
    buffer = io.StringIO()
    named = dataclasses.replace(report.model, name="deep[bold]")
    asked = on(dataclasses.replace(report, model=named), "16GB")
    Console(file=buffer, width=width, force_terminal=True, color_system=None).print(estimate_table(asked, width))
    lines = buffer.getvalue().splitlines()
    assert len(lines) <= 24 and "deep[bold]" in lines[1]
    assert len(plain_text(estimate_table(asked)).splitlines()) <= 24
    assert sum("dense" in line for line in lines) == 8


def test_top_and_notes(report):
    text = plain_text(estimate_table(dataclasses.replace(report, notes=("a", "b")), top=2))
    assert sum("(Dense)" in line for line in text.splitlines()) == 2
    assert text.splitlines()[-1].endswith("2 notes")


def test_a_report_prints_as_its_estimate_table(report):
    asked = on(report, "16GiB", total=3 * GIB, low=2 * GIB, high=4 * GIB)
    assert str(asked) == "deep fits 16GiB: needs 3.00 GiB, at most 4.00 GiB, of 16.0 GiB"
    assert (asked.fits, asked.peak, report.fits) == (True, 3 * GIB, None)
    assert str(report).startswith("deep needs ") and ", at most " in str(report)
    assert str(on(report, "3GiB", total=3 * GIB, low=2 * GIB, high=4 * GIB)).startswith(
        "deep too close to call on 3GiB"
    )
    frame = report.to_frame()
    assert list(frame["parameters"]) == [layer.parameters for layer in report.layers]
