"""XLA's plan against what the real allocator was asked for."""

from __future__ import annotations

import json

import keras
import measuring
import pytest

from kerasmem.errors import KerasmemError
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.graph.build import variables_of
from kerasmem.estimation.graph.memory import HANDLE_BYTES
from kerasmem.estimation.graph.program import Variable
from kerasmem.estimation.xla import XlaRefused, compile_plan, simulate
from kerasmem.estimation.xla_plan import XlaPlan
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import open_model
from kerasmem.models.step import prepare_step, trace_step

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers
ENVIRONMENT = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1"}


def plan_of(build, batch_size, mode="train"):
    with open_model(build) as opened:
        structure, inputs = model_inputs(opened.model, {})
        kept = []
        traced = trace_step(
            prepare_step(opened.model, opened.training, structure, inputs, batch_size, mode, jit_compile=True), kept
        )
        return compile_plan(traced), variables_of(traced)


@pytest.mark.parametrize(("build", "batch_size"), [(measuring.convnet, 32), (measuring.perceptron, 64)])
def test_the_allocator_is_asked_for_the_plan_and_the_total_is_the_measured_peak(program, build, batch_size):
    done = program(measuring.__file__, build.__name__, batch_size, "jit", env=ENVIRONMENT)
    assert done.code == 0, done.err[-2000:]
    measured = json.loads(done.out.splitlines()[-1])
    plan, _ = plan_of(build, batch_size)
    assert measured["requested"][0] == plan.temporary  # to the byte
    report = estimate(build, method="xla", batch_size=batch_size)
    assert len(set(measured["peaks"])) == 1
    assert report.bytes.total == pytest.approx(measured["peak"], rel=0.01)  # the rest is a few small tensors' chunks
    assert report.settings.execution == "xla"


def test_the_report_adds_up():
    report = estimate(measuring.convnet, method="xla", batch_size=16)
    sizes = [getattr(report.bytes, name) for name in report.bytes.CATEGORIES]
    assert sum(sizes) == report.bytes.total
    assert all(size >= 0 for size in sizes)
    assert report.bytes.inputs == 16 * (28 * 28 * 4 + 4)
    assert sum(row.bytes_at_peak for row in report.layers) <= report.bytes.total
    assert report.pool.requested <= report.pool.in_use == report.bytes.total <= report.pool.reserved
    assert report.bytes.low <= report.bytes.total <= report.bytes.high
    assert report.instant is not None


def test_what_xla_cannot_compile():
    def build():
        text = keras.Input((1,), dtype="string")
        return keras.Model(text, layers.Dense(1)(layers.Embedding(10, 2)(layers.Hashing(10)(text))))

    with pytest.raises(XlaRefused, match="XLA cannot compile the step"):
        plan_of(build, 4)
    with pytest.raises(KerasmemError, match="XLA cannot compile the step"):
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
