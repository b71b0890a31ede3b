"""How many rows a piece gets after failures, and what is tried."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext

import keras
import numpy as np
import pytest

from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.errors import ModelError
from kerasmem.training.steps.driver import Driver
from kerasmem.training.steps.engine import RanOut
from kerasmem.training.steps.remote import RemoteEngine
from kerasmem.training.steps.splitting import GiveUp, SplitPolicy

L = keras.layers
ROWS = 64
BATCH = (np.zeros((ROWS, 8), "float32"), np.zeros((ROWS, 1), "float32"))


def dense(jit_compile=False):
    model = keras.Sequential([keras.Input((8,)), L.Dense(512, "relu"), L.Dense(512, "relu"), L.Dense(1)])
    model.compile("adam", "mse", jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    return model


def failed(rows, **more):
    failure = RanOut(Diagnosis(True, summary="it ran out"), **more)
    failure.rows = rows
    return failure


@pytest.mark.parametrize(
    ("failures", "rows"),
    [
        ([failed(64)], 32),
        ([failed(64), failed(25)], 13),
        ([failed(2)], 1),
        ([failed(64), failed(1)], GiveUp()),
        ([failed(64), failed(32, is_update=True)], GiveUp(is_update=True)),
        ([failed(64, is_certain=False)], 64),  # killed, maybe for another reason
        ([failed(64, is_certain=False)] * 2, 32),
    ],
)
def test_the_policy_chooses_the_next_pieces(failures, rows):
    assert SplitPolicy().next(failures) == rows


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


@pytest.mark.parametrize(
    ("most", "tried"),
    [
        (0, [(64, 64), (2, 1)]),  # if one row runs out, nothing helps
        (32, [(64, 64), (2, 1), (64, 32)]),
        (5, [(64, 64), (2, 1), (64, 32), (64, 16), (64, 8), (64, 4)]),
    ],
)
def test_what_is_tried_after_a_failure(most, tried):
    engine = Engine(lambda rows: rows > most)
    driver = Driver(engine, dense())
    refusal = pytest.raises(ModelError, match=r"(?s)not even one row.*kerasmem\.recompute")
    with nullcontext() if most else refusal, pytest.warns(RuntimeWarning, match="ran out of memory"):
        driver.step("train", BATCH)
    assert engine.tried == tried


def test_an_update_that_runs_out_is_not_tried_with_smaller_pieces():
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
        driver = Driver(engine, model)
        with (
            pytest.raises(ModelError, match=r"the optimizer update does not fit in memory: it ran out") as told,
            pytest.warns(RuntimeWarning, match="ran out of memory"),
        ):
            driver.step("train", BATCH)
        assert engine.tried == [(64, 64), (2, 1)]
        assert ("a smaller batch_size" in str(told.value)) == is_told and "keras.optimizers.SGD" in str(told.value)


def test_a_process_that_ends_between_two_steps_is_told_of_too():
    model = dense()
    engine = RemoteEngine(model, BATCH)
    driver = Driver(engine, model)
    driver.step("train", BATCH)
    ended = engine.pid
    os.kill(ended, signal.SIGKILL)
    assert driver.copy_state() and engine.pid not in (None, ended)
    (told,) = driver.recoveries
    assert (told.kind, told.rows, told.micro_batch_rows, told.replayed) == ("state", 0, None, 1)
    assert "was ended by SIGKILL" in told.summary
    engine.close()
