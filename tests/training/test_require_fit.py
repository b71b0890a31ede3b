"""`require_fit` refuses what cannot fit before it trains."""

from __future__ import annotations

import keras
import pytest

import kerasmem
from kerasmem.errors import DoesNotFitError

pytestmark = pytest.mark.usefixtures("loaded_python")


def test_require_fit_tells_what_is_missing():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(500_000)], name="wide")
    model.compile("adam", "mse")
    assert kerasmem.require_fit(model, batch_size=4, device="16GB").device.verdict == "fits"
    with pytest.raises(DoesNotFitError, match=r"'wide': its weights and its optimizer alone take .*20.0 MiB"):
        kerasmem.require_fit(model, batch_size=4, device="20MiB")
    with pytest.raises(DoesNotFitError, match=r"'wide' at batch 4,096 takes .* by the estimate \(.*there are 1.00 GiB"):
        kerasmem.require_fit(model, batch_size=4096, device="1GiB")


def test_a_limit_of_the_cpus_allocator_leaves_xla_out(monkeypatch):
    """XLA's plan takes addresses for all variables there, and TensorFlow ends the process where there are none left."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1000)])
    model.compile("adam", "mse", jit_compile=False)
    assert kerasmem.require_fit(model, batch_size=4, device="16GB").settings.method == "graph"
    monkeypatch.setattr("kerasmem.estimation.xla.free_cpu_allocator_bytes", lambda: 150_000)
    model.compile("adam", "mse", jit_compile=True)
    report = kerasmem.require_fit(model, batch_size=4, device="16GB", jit_compile=True)
    assert report.settings.method == "graph"
    assert any("xla has no answer" in note and "has 146 KiB left of its limit" in note for note in report.notes)
