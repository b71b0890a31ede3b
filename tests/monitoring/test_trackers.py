"""The guide's trackers, with the real libraries, offline: they have the logger's series by their own callbacks.

Neither belongs to [test], for they are large: `scripts/test --with optional`.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from kerasmem import read_timeline

pytestmark = pytest.mark.optional
GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "trackers.md").read_text()
BLOCKS = re.findall(r"^```py\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


def run_block(library, place, monkeypatch):
    """Run the guide's block as it stands; return its names."""
    (code,) = (block for block in BLOCKS if f"import {library}" in block)
    monkeypatch.chdir(place)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    names = {"model": model, "x": np.ones((64, 8), "f4"), "y": np.ones((64, 1), "f4")}
    exec(compile(code, f"trackers.md, {library}", "exec"), names)
    return names


def test_weights_and_biases_has_the_series(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_block("wandb", tmp_path, monkeypatch)
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    ends, written = time.monotonic() + 60, b""
    while b"memory_rss_bytes" not in written and time.monotonic() < ends:  # a process of its own writes it
        written = record.read_bytes()  # what `wandb sync` sends
        time.sleep(0.1)
    has_peak = read_timeline(tmp_path / "memory.csv").max("peak_bytes") is not None  # the CPU's allocator may keep none
    assert b"memory_rss_bytes" in written and (b"memory_peak_bytes" in written) == has_peak
    assert (tmp_path / "memory.csv").stat().st_size > 0
    assert list((tmp_path / "wandb").glob("offline-run-*/files/memory.csv"))


def test_mlflow_has_the_series(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = run_block("mlflow", tmp_path, monkeypatch)["run"]
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "memory_rss_bytes")
    assert [metric.step for metric in history] == [0, 1] and history[0].value > 2**20
