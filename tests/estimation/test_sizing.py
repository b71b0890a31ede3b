"""`kerasmem.max_batch_size`: checked against estimates of the neighbours."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import pytest

import kerasmem
from kerasmem.errors import UsageError
from kerasmem.estimation import facade, sizing
from kerasmem.estimation.search import SearchResult
from kerasmem.rendering.layout import plain_text
from kerasmem.rendering.search_table import search_table

layers = keras.layers


def deep(n=2, width=64):
    stack = [layers.Dense(width, activation="relu", name=f"dense_{number}") for number in range(n)]
    model = keras.Sequential([keras.Input((32,), name="input"), *stack], name="deep")
    model.compile("sgd", "mse")
    return model


def fits(room, **options):
    return kerasmem.estimate(deep, device=room, method="formula", **options).device.verdict


def test_the_batch():
    step = 64  # so that 1 % of the size is less than a step
    result = kerasmem.max_batch_size(deep, device="2MB", method="formula", step=step)
    assert fits("2MB", batch_size=result.largest) == "fits"
    assert fits("2MB", batch_size=result.largest + step) == "too close to call"
    assert fits("2MB", batch_size=result.fails_from - step) == "too close to call"
    assert fits("2MB", batch_size=result.fails_from) == "does not fit"
    assert result.report.settings.batch_size == result.largest
    assert result.device.verdict == "fits"
    assert SearchResult.from_dict(result.to_dict()) == result


def test_auto_keeps_to_the_method_that_answers(monkeypatch):
    asked = []
    real = kerasmem.estimate

    def noted(model, **settings):
        asked.append(settings["method"])
        return real(model, **{**settings, "method": "formula"})

    monkeypatch.setattr(sizing, "estimate", noted)
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
    with facade.kept_open():
        kept = {size: kerasmem.estimate(build, device="2MB", method="graph", batch_size=size) for size in (3, 9)}
        assert len(opened) == 1
        kerasmem.estimate(build, method="formula")
        assert len(opened) == 2
    assert kept == apart


def test_a_model_with_a_step_of_its_own_is_opened_for_each_size():
    opened = []

    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    def build():
        opened.append(1)
        inputs = keras.Input((4,))
        return Own(inputs, layers.Dense(2)(inputs))

    with facade.kept_open():
        assert [kerasmem.estimate(build, method="formula", batch_size=size).bytes.total for size in (1, 2)]
    assert len(opened) == 2


def test_the_maximum_is_said():
    result = kerasmem.max_batch_size(deep, device="2GB", method="formula", maximum=16)
    assert result.largest == 16
    assert "everything up to the maximum fits (batch size 16)" in result.notes


def test_one_percent_is_said():
    result = kerasmem.max_batch_size(deep, device="700MB", method="formula")
    if result.largest + 1 not in {each.size for each in result.evaluations}:
        assert "to within 1 %" in result.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"minimum": 0}, "minimum"), ({"minimum": 1.5}, "whole number"), ({"method": "magic"}, "magic"),
     ({"device": "nonsense"}, "catalogue"), ({"maximum": True}, "whole number")],
)  # fmt: skip
def test_wrong_usage(options, message):
    with pytest.raises(UsageError, match=message):
        kerasmem.max_batch_size(deep, **{"device": "2MB", "method": "formula", **options})


def test_a_fixed_batch_is_refused():
    def fixed():
        return keras.Sequential([keras.Input((4,), batch_size=32), layers.Dense(2)])

    with pytest.raises(UsageError, match="fixes the batch at 32"):
        kerasmem.max_batch_size(fixed, device="2MB", method="formula")


@pytest.mark.parametrize(("cards", "is_said"), [([], True), ([None], True), ([None, 0], False)])
def test_real_steps_ran_on_the_cpu_where_no_card_is_let_through(monkeypatch, cards, is_said):
    monkeypatch.setattr(sizing, "list_devices", lambda environ: [SimpleNamespace(cuda_index=each) for each in cards])
    notes = sizing._trial_notes(sizing.Found(8, None, True, None, True, ()), 8, ())
    assert any("ran on the CPU" in each for each in notes) == is_said
