"""What a notebook shows, executed as nbconvert does: charts in a cell, and never a flood."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a kernel takes seconds; frame and lines have quick tests of their own
ROOT = Path(__file__).resolve().parents[2]
START = """
import keras, numpy as np, kerasmem
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((4096, 8), "f4"), np.ones((4096, 1), "f4")
"""
CELLS = (
    "history = model.fit(x, y, epochs=3, batch_size=8, verbose=0, callbacks=[kerasmem.MemoryLogger()])",
    "logger = kerasmem.MemoryLogger(verbose=1)\n"
    "history = model.fit(x, y, epochs=3, batch_size=8, verbose=0, callbacks=[logger])",
    "kerasmem.report_page(logger.timeline, kerasmem.estimate(model, method='formula'))",
)


def test_a_notebook_is_never_flooded(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install 'kerasmem[test]'")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    cells = [nbformat.v4.new_code_cell(code) for code in (START, *CELLS)]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()

    silent, lines, page = (cell.outputs for cell in book.cells[1:])
    assert silent == []
    assert len("".join(each["text"] for each in lines).splitlines()) == 3  # a line an epoch
    (shown,) = page
    assert shown["data"]["text/html"].startswith("<iframe") and len(shown["data"]["text/html"]) < 300_000
    assert "ReportPage" in shown["data"]["text/plain"] and len(shown["data"]["text/plain"]) < 200
