"""Searches and comparisons on terminals of any width: nothing is cut, and no line is too long."""

from __future__ import annotations

import io

import keras
import pytest
from rich.console import Console

import kerasmem
from kerasmem.estimation.comparing import compare
from kerasmem.rendering.comparison_table import comparison_table
from kerasmem.rendering.formatting import signed_size
from kerasmem.rendering.search_tables import search_table


def build(units=64):
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(units, name="a_layer"), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def results():
    search = kerasmem.max_batch_size(build, device="40MB", method="formula")
    reports = [kerasmem.estimate(build, factory_args={"units": n}, device="2MB", method="formula") for n in (64, 4096)]
    return {"search": search, "comparison": compare(*reports, budget=10**6, max_increase="10%")}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("name", "show"), [("search", search_table), ("comparison", comparison_table)])
def test_nothing_is_cut(results, name, show, width):
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=True, color_system=None).print(show(results[name], width))
    text = buffer.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    if name == "search":
        assert f"{results[name].largest:,}" in text
        assert "too close to call" in text
    else:
        assert "a_layer" in text
        assert "Weights" in text
        assert signed_size(results[name].categories[-1].change) in text


def test_signs():
    assert [signed_size(each) for each in (1536, -1536, 0, None)] == ["+1.50 KiB", "−1.50 KiB", "0 B", "–"]
