"""`kerasmem.max_batch_size`: checked against estimates of the neighbours."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import keras
import pytest

import kerasmem
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation import sizing
from kerasmem.estimation.estimating import EstimateSession
from kerasmem.estimation.search import SearchResult
from kerasmem.models.spec import StepSpec
from kerasmem.rendering.formatting import plain_text
from kerasmem.rendering.search_tables import search_table

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers


def deep(n=2, width=64):
    stack = [layers.Dense(width, activation="relu", name=f"dense_{number}") for number in range(n)]
    model = keras.Sequential([keras.Input((32,), name="input"), *stack], name="deep")
    model.compile("sgd", "mse")
    return model


def fits(room, **options):
    return kerasmem.estimate(deep, device=room, method="formula", **options).device.verdict


def test_the_batch():
    result = kerasmem.max_batch_size(deep, device="2MB", method="formula")
    assert fits("2MB", batch_size=result.largest) == "fits"
    assert fits("2MB", batch_size=int(1.02 * result.largest)) == "too close to call"
    assert fits("2MB", batch_size=int(0.98 * result.fails_from)) == "too close to call"
    assert fits("2MB", batch_size=result.fails_from) == "does not fit"
    assert result.report.settings.batch_size == result.largest
    assert result.device.verdict == "fits"
    assert SearchResult.from_dict(result.to_dict()) == result
    shared = kerasmem.max_batch_size(deep, device="2MB", method="formula", replicas=2)
    assert shared.largest == pytest.approx(2 * result.largest, rel=0.02)


def test_auto_keeps_to_the_method_that_answers(monkeypatch):
    asked = []
    real = EstimateSession.estimate

    def noted(session, **settings):
        asked.append(settings.get("method", "auto"))
        return real(session, **{**settings, "method": "formula"})

    monkeypatch.setattr(EstimateSession, "estimate", noted)
    result = kerasmem.max_batch_size(deep, device="2MB")
    assert asked == ["auto"] + ["formula"] * (len(result.evaluations) - 1)


def test_the_smallest_does_not_fit_and_no_upper_end():
    result = kerasmem.max_batch_size(lambda: deep(4, 2048), device="2MB", method="formula")
    assert (result.largest, result.device.verdict) == (None, "does not fit")
    assert "batch size 1 does not fit, at least" in plain_text(search_table(result))

    def recurrent():
        return keras.Sequential([keras.Input((4, 4)), layers.LSTM(4)])

    result = kerasmem.max_batch_size(recurrent, device="2MB", method="formula")
    assert (result.largest, result.device.verdict) == (None, "too close to call")
    assert any("no upper end" in note for note in result.notes)


def test_a_model_that_stays_the_same_is_opened_once(monkeypatch):
    opened = []

    def build():
        opened.append(1)
        model = deep(width=8)
        model.add(layers.Dropout(0.5, name="dropout"))
        model.compile(keras.optimizers.SGD(name="own"), "mse", metrics=["mae"])  # others are numbered
        return model

    apart = {size: kerasmem.estimate(build, device="2MB", method="graph", batch_size=size) for size in (3, 9)}
    opened.clear()
    with EstimateSession(StepSpec(build, device="2MB", method="graph")) as session:
        reused = {size: session.estimate(batch_size=size) for size in (3, 9)}
        assert len(opened) == 1
        session.estimate(method="formula")
        assert len(opened) == 1
    assert reused == apart


def test_a_model_with_a_step_of_its_own_is_opened_for_each_size():
    opened = []

    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    def build():
        opened.append(1)
        inputs = keras.Input((4,))
        return Own(inputs, layers.Dense(2)(inputs))

    with EstimateSession(StepSpec(build, method="formula")) as session:
        assert [session.estimate(batch_size=size).bytes.total for size in (1, 2)]
    assert len(opened) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"maximum": 0}, "maximum"), ({"maximum": 1.5}, "whole number"), ({"method": "magic"}, "magic"),
     ({"device": "nonsense"}, "catalogue"), ({"maximum": True}, "whole number"), ({"margin": 1}, "margin"),
     ({"margin": "much"}, "margin"), ({"timeout": 0}, "timeout")],
)  # fmt: skip
def test_wrong_arguments(options, message):
    with pytest.raises(UsageError, match=message):
        kerasmem.max_batch_size(deep, **{"device": "2MB", "method": "formula", **options})


@pytest.mark.parametrize("batch_size", [1, 32])
def test_a_fixed_batch_is_refused(batch_size):
    def fixed():
        return keras.Sequential([keras.Input((4,), batch_size=batch_size), layers.Dense(2)])

    with pytest.raises(UsageError, match=f"fixes the batch at {batch_size}"):
        kerasmem.max_batch_size(fixed, device="2MB", method="formula")


@pytest.mark.parametrize(("cards", "is_said"), [([], True), ([None], True), ([None, 0], False)])
def test_note_on_trials_without_a_gpu(monkeypatch, cards, is_said):
    monkeypatch.setattr(sizing, "list_devices", lambda environ: [SimpleNamespace(cuda_index=item) for item in cards])
    notes = sizing._trial_notes(8, 8, ())
    assert any("ran on the CPU" in item for item in notes) == is_said


def test_a_stand_in_search_ends_at_the_memory_of_the_card():
    def wide():
        return keras.Sequential([keras.Input((32,)), layers.Dense(2**19, activation="gelu"), layers.Dense(2)])

    result = kerasmem.max_batch_size(wide, device="t4", method="xla")
    assert result.report.settings.stands_in and result.device.verdict == "fits"
    assert all(row.total <= result.device.available_bytes for row in result.evaluations)


def split_batch(parts):
    def build():
        inputs = keras.Input((16,))
        split = keras.ops.split(layers.Dense(64)(inputs), parts)
        model = keras.Model(inputs, layers.Dense(2)(keras.ops.concatenate([2 * part for part in split], 0)))
        model.compile("sgd", "mse")
        return model

    return build


@pytest.mark.parametrize("parts", [3, 4])
def test_a_model_that_splits_its_batch_is_searched_in_multiples(parts):
    result = kerasmem.max_batch_size(split_batch(parts), device="2MB", method="formula", maximum=600)
    assert result.largest > parts and all(row.size % parts == 0 for row in result.evaluations)
    assert any(f"multiples of {parts}" in note for note in result.notes)
    with pytest.raises(KerasmemError, match="divisible"):
        kerasmem.max_batch_size(split_batch(parts), device="2MB", method="formula", maximum=2)
    with pytest.raises(KerasmemError, match="divisible"):
        kerasmem.max_batch_size(split_batch(49), device="2MB", method="formula")


def test_the_formula_for_one_sample_does_not_choose_the_method(monkeypatch):
    real = EstimateSession.estimate

    def of_multiples(session, batch_size, method="graph"):
        if batch_size % 4:
            return replace(real(session, batch_size=batch_size, method="formula"), fallback="graph has no answer")
        return real(session, batch_size=batch_size, method=method)

    monkeypatch.setattr(EstimateSession, "estimate", of_multiples)
    result = kerasmem.max_batch_size(deep, device="64MB", maximum=10)
    assert (result.largest, result.report.settings.method) == (8, "graph")


# Real steps


@pytest.fixture(scope="module")
def model():
    keras.backend.clear_session()
    conv = [layers.Conv2D(16, 3, padding="same", activation="tanh") for _ in range(3)]
    stack = [keras.Input((64, 64, 3)), *conv, layers.GlobalAveragePooling2D(), layers.Dense(10)]
    model = keras.Sequential(stack, name="net")
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def outcome(model):
    return kerasmem.max_batch_size(model, device="2MiB", margin=0.25, method="formula", jit_compile=False, confirm=True)


def test_steps_that_do_not_fit(outcome):
    (trial,) = outcome.trials
    assert (outcome.largest, outcome.device.verdict, trial.size, trial.fits) == (None, "does not fit", 1, False)
    assert trial.limit_bytes == 3 * 2**19 and trial.peak_bytes is None
    assert "ran out of memory" in trial.reason or "may crash" in trial.reason
    assert any("not even batch size 1" in note for note in outcome.notes)
    again = SearchResult.from_dict(json.loads(json.dumps(outcome.to_dict())))
    assert again == outcome


def test_nothing_of_this_process_is_touched(model):
    weights = [item.copy() for item in model.get_weights()]
    threads, optimizer = threading.active_count(), model.optimizer.iterations.numpy()
    kerasmem.max_batch_size(model, device="64MB", maximum=2, method="formula", confirm=True)
    assert all((one == other).all() for one, other in zip(weights, model.get_weights(), strict=True))
    assert threading.active_count() == threads and model.optimizer.iterations.numpy() == optimizer


def test_trials_of_a_model_that_splits_its_batch():
    result = kerasmem.max_batch_size(split_batch(4), device="64MB", maximum=12, method="formula", confirm=True)
    assert [(trial.size, trial.fits) for trial in result.trials] == [(12, True)]
