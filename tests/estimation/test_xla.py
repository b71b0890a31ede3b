"""XLA's plan against what the real allocator was asked for."""

from __future__ import annotations

import keras
import measuring
import pytest

from kerasmem.estimation import methods
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.graph.memory import HANDLE_BYTES
from kerasmem.estimation.graph.program import Variable
from kerasmem.estimation.xla import XlaRefused, compile_plan, simulate
from kerasmem.estimation.xla_plan import XlaPlan

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers


def test_plan_equals_the_measured_requests_and_peak(program, monkeypatch):
    plans = []
    monkeypatch.setattr(methods, "compile_plan", lambda traced: plans.append(compile_plan(traced)) or plans[0])
    report = estimate(measuring.convnet, method="xla", batch_size=32)
    measured = measuring.measure(program, "convnet", 32, "jit")
    assert measured["requested"][0] == plans[0].temporary  # to the byte
    assert len(set(measured["peaks"])) == 1
    assert report.bytes.total == pytest.approx(measured["peak"], rel=0.01)  # the rest is a few small tensors' chunks
    assert report.settings.execution == "xla"
    sizes = [getattr(report.bytes, name) for name in report.bytes.CATEGORIES]
    assert sum(sizes) == report.bytes.total
    assert all(size >= 0 for size in sizes)
    assert report.bytes.inputs == 32 * (28 * 28 * 4 + 4)
    assert sum(row.bytes_at_peak for row in report.layers) <= report.bytes.total
    assert report.pool.requested <= report.pool.in_use == report.bytes.total <= report.pool.reserved
    assert report.bytes.low <= report.bytes.total <= report.bytes.high
    assert report.instant is not None


def test_step_that_xla_cannot_compile():
    def build():
        text = keras.Input((1,), dtype="string")
        return keras.Model(text, layers.Dense(1)(layers.Embedding(10, 2)(layers.Hashing(10)(text))))

    with pytest.raises(XlaRefused, match="XLA cannot compile the step"):
        estimate(build, method="xla")
    report = estimate(build, jit_compile=True)
    assert report.settings.method == "graph"
    assert any("xla has no answer: XLA cannot compile" in note for note in report.notes)


def variable(kind):
    return Variable("v", 1024, kind, "filled", (256,), "float32")


def test_the_peak_is_that_of_a_step_after_the_first():
    plan = XlaPlan(argument=0, results=(512,), temporary=4096)
    heap = simulate(plan, [variable("weights"), *[variable("optimizer")] * 2], (2048,))
    held = 3 * (1024 + HANDLE_BYTES) + 2048
    assert heap.allocator.requested_in_use == held
    assert heap.peak.requested == held + 4096 + 512
