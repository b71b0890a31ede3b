"""Real steps of the plan that `kerasmem.advise` recommends."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import advised_models
import pytest

import kerasmem
from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import KerasmemError
from kerasmem.estimation.search import Trial
from kerasmem.models.spec import StepSpec
from kerasmem.recovery import plans as winner
from kerasmem.recovery.advice import Advice, Remedy
from kerasmem.recovery.changed_model import whole_arrays
from kerasmem.recovery.estimator import StepEstimator
from kerasmem.rendering.formatting import plain_text
from kerasmem.rendering.remedy_texts import advice_table

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(advised_models.__file__)
BATCH = 256
MICRO = {"kind": "micro_batches", "value": 4}


def estimator(device):
    origin = StepSpec(f"{MODELS}:residual", factory_args={"blocks": 2})
    return StepEstimator(origin, resolve_device(device), BATCH, "train", False, "graph", None)


def plan(name, verdict="fits", changes=(MICRO,)):
    return Remedy(name, changes, "same", "", 1.0, 10, 9, 11, 20, verdict, "graph", "model.fit()")


def test_arrays_larger_than_the_device_do_not_fit():
    samples = 10**9
    advice = kerasmem.advise(f"{MODELS}:residual", device="16GB", method="graph", budget_seconds=0, samples=samples)
    assert (advice.device.verdict, advice.verdict) == ("does not fit", "does not fit")
    assert advice.data_bytes == samples * (16 + 2) * 4  # inputs and targets
    head = plain_text(advice_table(advice, 120, is_brief=True), 120).split("Now:")[0]
    assert "67.1 GiB" in head and "model.fit copies the arrays" in head and "H5ChunkSequence" in head


def test_steps_have_the_rest_of_the_device():
    samples = 1000
    asked = {"device": "64MB", "method": "graph", "budget_seconds": 0}
    advice = kerasmem.advise(f"{MODELS}:residual", samples=samples, **asked)
    assert advice.device.available_bytes == 64_000_000 - samples * (16 + 2) * 4
    assert advice.need == kerasmem.advise(f"{MODELS}:residual", **asked).need


def test_predict_keeps_all_outputs_and_joins_them():
    spec = StepSpec(f"{MODELS}:residual", mode="inference", method="formula")
    arrays = whole_arrays(spec, 100)
    assert (arrays.step_bytes, arrays.most_bytes) == (100 * (16 + 2) * 4, 100 * (16 + 2 * 2) * 4)
    report = kerasmem.estimate(spec.model, mode="inference", method="formula", batch_size=32)
    joined = arrays.joined(report, descending=True)
    assert joined.low == arrays.most_bytes + report.bytes.weights < joined.total < joined.high
    assert whole_arrays(spec, 32).joined(report, descending=True) is None, "a single batch is returned as it is"


PREDICT = """
import sys
import keras, numpy as np, tensorflow as tf
from keras import layers

def wide(size=40):
    inputs = keras.Input((size, size, 3))
    hidden = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    return keras.Model(inputs, layers.Conv2D(9, 3, padding="same")(hidden))

if __name__ == "__main__":
    images = np.ones((200, 40, 40, 3), "float32")
    wide().predict(images, verbose=0)
    print(tf.config.experimental.get_memory_info("CPU:0")["peak"])
"""


def test_real_predict_takes_what_its_last_join_is_said_to_need(tmp_path):
    script = tmp_path / "wide_output.py"
    script.write_text(PREDICT)
    environ = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, check=True)
    peak = int(ended.stdout)

    def advise(size):
        return kerasmem.advise(
            f"{script}:wide", device=str(size), mode="inference", samples=200, budget_seconds=0, method="graph"
        )

    assert advise(peak).device.verdict == "too close to call", "a pool as large as the peak has no room for its pieces"
    assert advise(int(0.8 * peak)).device.verdict == "does not fit"
    assert advise(2 * peak).device.verdict == "fits"
    assert any("joins the outputs" in note for note in advise(2 * peak).notes)


def test_the_next_plan_is_run_where_the_first_runs_out(monkeypatch):
    asked = estimator("64MB")
    tried = []

    def steps(request, batch_size, limit, **options):
        tried.append((request.factory_args["changes"], batch_size, limit, request.jit_compile))
        return Trial(batch_size, len(tried) == 2, None if len(tried) == 1 else 7, limit, "OOM")

    monkeypatch.setattr(winner, "try_batch", steps)
    plans = [plan("a"), plan("b", "too close to call", ({"kind": "batch_size", "value": 64},)), plan("c")]
    found = winner.confirm_plans(asked, plans, notes := [])
    assert [(each.name, each.verdict) for each in found] == [("b", "fits"), ("c", "fits"), ("a", "does not fit")]
    assert [each.trial is None for each in found] == [False, True, False] and notes == []
    assert tried == [([MICRO], 64, 64_000_000, False), ([], 64, 64_000_000, False)]
    tried.clear()
    monkeypatch.setattr(winner, "_run_plan", lambda *_: (_ for _ in ()).throw(KerasmemError("it lives here only")))
    assert winner.confirm_plans(asked, plans, notes) == plans
    assert notes == ["a: its steps were not run: it lives here only"]
    hopeless = [plan("d", "does not fit")]
    assert winner.confirm_plans(asked, hopeless, notes) == hopeless and len(notes) == 1


def test_real_steps_of_the_winner():
    asked = estimator("200MB")
    (found,) = winner.confirm_plans(asked, [plan("4 micro-batches of 64", "too close to call")], notes := [])
    assert notes == [] and found.verdict == "fits"
    assert found.trial.size == 64 and 0 < found.trial.peak_bytes < found.trial.limit_bytes == 200_000_000
    current = asked.estimate_current()
    advice = Advice(current.model, current.settings, current.bytes, replace(current.device, verdict="does not fit"),
                    plans=(found, plan("b")))  # fmt: skip
    assert Advice.from_dict(advice.to_dict()) == advice
    told = advice.to_dict()
    assert told["plans"][0]["trial"]["fits"] is True
    text = plain_text(advice_table(advice, 120), 120)
    assert "; real steps took " in text
