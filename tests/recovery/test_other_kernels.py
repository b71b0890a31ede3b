"""A convolutional model on a CPU where TensorFlow leaves oneDNN's kernels off."""

from __future__ import annotations

import keras
import pytest

from kerasmem.devices import kernels
from kerasmem.devices.kernels import EIGEN, ONEDNN, assumed
from kerasmem.errors import KerasmemError
from kerasmem.estimation.facade import estimate
from kerasmem.recovery import facade
from kerasmem.units import format_size

layers = keras.layers


def convnet():
    """Named, for the order of operations goes by names: "conv2d_10" comes before "conv2d_9"."""
    parts = [*(layers.Conv2D(32, 3, name=f"conv_{number}") for number in range(3)), layers.Flatten(name="flat")]
    return keras.Sequential([keras.Input((32, 32, 3)), *parts, layers.Dense(1, name="out")], name="net")


@pytest.fixture
def notes(monkeypatch):
    """The notes of advice on a device, without remedies."""

    def refuse(*arguments):
        raise KerasmemError("none are asked for")

    monkeypatch.setattr(facade, "traits_of", refuse)
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")

    def ask(kind, device, **options):
        with assumed(kind):
            return [each for each in facade.advise(convnet, device=device, **options).notes if "ONEDNN" in each]

    return ask


def test_what_onednn_would_take_is_told(notes):
    (note,) = notes(EIGEN, "16GB", batch_size=16)
    totals = []
    for kind in (ONEDNN, EIGEN):
        with assumed(kind):
            totals.append(estimate(convnet, batch_size=16, method="graph").bytes.total)
    less, now = totals
    assert less < 0.8 * now
    assert f"before Python starts: {format_size(less)} in place of {format_size(now)}, fits, by the same" in note
    assert "not measured" in note


@pytest.mark.parametrize(
    ("kind", "device", "options"),
    [(ONEDNN, "16GB", {}), (EIGEN, "t4", {"method": "graph"}), (EIGEN, "16GB", {"method": "formula"})],
)
def test_only_where_the_step_runs_on_tensorflows_own_kernels(notes, kind, device, options):
    assert notes(kind, device, batch_size=16, **options) == []
