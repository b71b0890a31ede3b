"""How many rows a piece gets: from estimates of the live model's own step, and from what failures asked for."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext

import keras
import numpy as np
import pytest

from kerasmem.devices.kernels import CUDA, TITLES
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.errors import ModelError
from kerasmem.estimation.outcomes import model_outcome
from kerasmem.training.steps.driver import Driver
from kerasmem.training.steps.engine import RanOut
from kerasmem.training.steps.policy import Failure, GiveUp, SplitPolicy
from kerasmem.training.steps.remote import RemoteEngine
from kerasmem.training.steps.sizing import Fitting, estimate_fitting, most_rows, nothing_fits

L = keras.layers
ROWS = 64
BATCH = (np.zeros((ROWS, 8), "float32"), np.zeros((ROWS, 1), "float32"))


def dense(jit_compile=False):
    model = keras.Sequential([keras.Input((8,)), L.Dense(512, "relu"), L.Dense(512, "relu"), L.Dense(1)])
    model.compile("adam", "mse", jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_models_own_step_is_estimated_and_stays_as_it_is(jit_compile):
    model = dense(jit_compile)
    before = model.get_weights()
    small, large = (model_outcome(model, (*BATCH, np.ones(ROWS)), rows) for rows in (16, 4096))
    held = 4 * 3 * model.count_params()
    assert held < small.low < small.total <= small.high < large.low
    assert large.total - small.total > 4080 * 512 * 4, "a layer's output at least"
    assert abs(small.optimizer / (held * 2 // 3) - 1) < 0.05
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("jit_compile", [False, True])
def test_beside_a_card_its_kernels_count(monkeypatch, jit_compile):
    import tensorflow as tf

    here = model_outcome(dense(jit_compile), BATCH, 16)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["card"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda card: {"compute_capability": (7, 5)})
    monkeypatch.setattr("kerasmem.devices.training_device.allocator_limit", lambda: 2**34)
    found = model_outcome(dense(jit_compile), BATCH, 16)
    assert (TITLES[CUDA] in found.notes[0]) != jit_compile
    held = sum(getattr(found, name) for name in ("weights", "optimizer", "inputs"))
    assert (found.low == held < here.low) == jit_compile, "XLA's plan for the CPU stands in for the card's"


def test_most_rows_asks_seldom():
    asked = []

    def need(rows):
        asked.append(rows)
        return 1000 + 10 * rows + (300 if rows > 500 else 0)

    assert most_rows(need, 3000, 4096, lambda: True) in range(150, 201)
    assert len(set(asked)) <= 5
    assert most_rows(need, 10**6, 4096, lambda: True) == 4096
    assert most_rows(need, 900, 4096, lambda: True) == 0
    assert most_rows(need, 3000, 4096, lambda: False) in range(120, 201), "no time: on the line"


def test_rows_that_surely_fit_differ_from_rows_that_may_fit():
    model = dense()
    outcomes = [model_outcome(model, BATCH, rows) for rows in (1, ROWS)]
    for limit, is_sure in ((2 * outcomes[1].high, True), (min(each.total for each in outcomes), False), (10, False)):
        found = estimate_fitting(model, "train", BATCH, ROWS, limit, accumulates=False)
        assert found.is_sure == is_sure and (found.rows == ROWS) == (limit >= outcomes[1].total)
        assert (found.rows == 0) == found.is_impossible == (limit == 10)
    limit = 2 * outcomes[1].high
    held = estimate_fitting(model, "train", BATCH, ROWS, limit, limit, accumulates=False)  # it may be freed
    assert held.rows == 0 and not held.is_impossible
    added = estimate_fitting(model, "train", BATCH, ROWS, limit, accumulates=True).added
    assert added == 4 * model.count_params()
    assert estimate_fitting(model, "train", (np.array(["a"] * 4), None), 2, 10, accumulates=False) is None


@pytest.mark.parametrize(
    ("policy", "failures", "next_rows", "is_in_doubt"),
    [
        (SplitPolicy(64), [Failure(64)], 32, True),
        (SplitPolicy(64), [Failure(64), Failure(32)], 16, True),
        (SplitPolicy(64, 16, is_sure=True), [Failure(64)], 16, False),
        (SplitPolicy(64, 16), [Failure(64)], 16, True),
        (SplitPolicy(64, 16, is_sure=True), [Failure(64), Failure(16)], 4, True),  # much less, against the estimate
        (SplitPolicy(64, 0), [Failure(64)], 16, True),
        (SplitPolicy(64, 0, is_impossible=True), [Failure(64)], GiveUp(), True),
        (SplitPolicy(64, 16), [Failure(1)], GiveUp(), True),
        (SplitPolicy(64, 16), [Failure(64), Failure(16, is_update=True)], GiveUp(is_update=True), True),
        (SplitPolicy(64), [Failure(64, is_certain=False)], 64, False),  # killed, maybe for another reason
        (SplitPolicy(64), [Failure(64, is_certain=False)] * 2, 32, False),
    ],
)
def test_the_policy_chooses_the_next_pieces(policy, failures, next_rows, is_in_doubt):
    assert policy.next(failures) == next_rows
    assert policy.is_in_doubt(failures) == is_in_doubt


SURE, IN_DOUBT = (Fitting(16, is_sure, None, 100, 0, 0) for is_sure in (True, False))
HOPELESS = Fitting(0, False, None, 100, 0, 0)


class Engine:
    """Runs out by a rule, as an engine does."""

    def __init__(self, needs):
        self.needs, self.tried = needs, []

    def step(self, kind, batch, size):
        size = min(size, len(batch[0]))
        self.tried.append((len(batch[0]), size))
        if self.needs(size):
            raise RanOut(Diagnosis(True, summary="it ran out", limit_bytes=100))
        return {"loss": 0.0}

    def state(self):
        return {"model": [np.zeros(3)]}

    def load(self, state):
        pass

    def other_bytes(self, state_bytes):
        return 0


@pytest.fixture
def estimated(monkeypatch):
    """Return a function that sets the answer of the estimator."""

    def estimate(fitting):
        monkeypatch.setattr("kerasmem.training.steps.driver.estimate_fitting", lambda *_, **named: fitting)

    return estimate


@pytest.mark.parametrize(
    ("needs", "fitting", "tried"),
    [
        (lambda n: True, None, [(64, 64), (2, 1)]),
        (lambda n: n > 16, None, [(64, 64), (2, 1), (64, 32), (64, 16)]),
        (lambda n: n > 16, SURE, [(64, 64), (64, 16)]),
        (lambda n: n > 4, SURE, [(64, 64), (64, 16), (2, 1), (64, 4)]),
        (lambda n: True, HOPELESS, [(64, 64), (2, 1)]),
        (lambda n: n > 16, HOPELESS, [(64, 64), (2, 1), (64, 16)]),
        (lambda n: n > 4, IN_DOUBT, [(64, 64), (2, 1), (64, 16), (64, 4)]),
    ],
)
def test_what_is_tried_after_a_failure(estimated, needs, fitting, tried):
    engine = Engine(needs)
    estimated(fitting)
    driver = Driver(engine, dense())
    with (
        pytest.raises(ModelError, match=r"(?s)not even one row at a time.*A smaller batch cannot help")
        if needs(1)
        else nullcontext(),
        pytest.warns(RuntimeWarning, match="ran out of memory"),
    ):
        driver.step("train", BATCH)
    assert engine.tried == tried


def test_where_nothing_helps_the_message_has_the_figures_and_what_could():
    rows = [L.Reshape((1, 8)), L.UpSampling1D(1_000_000), L.GlobalAveragePooling1D(), L.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *rows])
    model.compile("adam", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    fitting = estimate_fitting(model, "train", BATCH, 2, 16 * 2**20, accumulates=True)
    assert fitting.is_impossible, "it holds too much, so not one row is tried"
    message = nothing_fits("it ran out", model, fitting, 0)
    assert "not even one row at a time fits: it ran out" in message and "the device has 16.0 MiB" in message
    assert "kerasmem.recompute(model)" in message and "a smaller model" in message and "a larger card" in message
    assert "smaller batches" not in message and "such as keras.optimizers.SGD" in message


def test_an_update_that_runs_out_is_not_tried_with_smaller_pieces(estimated):
    class Updating(Engine):
        def step(self, kind, batch, size):
            try:
                return super().step(kind, batch, size)
            except RanOut as failure:
                raise RanOut(failure.diagnosis, is_update=size < len(batch[0])) from None

    words = keras.Sequential([keras.Input((8,)), L.Embedding(9, 4), L.GlobalMaxPooling1D(), L.Dense(1)])
    words.compile("adam", "mse", jit_compile=False)
    words.optimizer.build(words.trainable_variables)
    for model, is_told in ((dense(), False), (words, True)):
        engine = Updating(lambda n: True)
        estimated(SURE)
        driver = Driver(engine, model)
        with (
            pytest.raises(ModelError, match=r"the update of the weights does not fit: it ran out") as told,
            pytest.warns(RuntimeWarning, match="ran out of memory"),
        ):
            driver.step("train", BATCH)
        assert engine.tried == [(64, 64), (64, 16)]
        assert ("a smaller batch_size" in str(told.value)) == is_told and "keras.optimizers.SGD" in str(told.value)


def test_a_process_that_ends_between_two_steps_is_told_of_too():
    model = dense()
    engine = RemoteEngine(model, BATCH)
    driver = Driver(engine, model)
    driver.step("train", BATCH)
    ended = engine.pid
    os.kill(ended, signal.SIGKILL)
    assert driver.keep() and engine.pid not in (None, ended)
    (told,) = driver.recoveries
    assert (told.kind, told.rows, told.micro_batch_rows, told.replayed) == ("state", 0, None, 1)
    assert "was ended by SIGKILL" in told.summary
    engine.close()
