"""From the estimator's size to one that ran: the search, and real steps under a real limit."""

import json
import random
import threading

import keras
import pytest

from kerasmem.errors import UsageError
from kerasmem.estimation.search import SearchResult, Trial, largest_that_ran
from kerasmem.estimation.sizing import max_batch_size

pytestmark = pytest.mark.usefixtures("loaded_python")


def ran_up_to(most, log=None):
    def try_size(size):
        if log is not None:
            log.append(size)
        return Trial(size, size <= most, None, 0, 0.0)

    return try_size


def test_an_exact_estimate_takes_one_try():
    largest, trials = largest_that_ran(ran_up_to(64), first=64, fails_from=65)
    assert largest == 64 and [each.size for each in trials] == [64]
    largest, trials = largest_that_ran(ran_up_to(64), first=64, fails_from=None)
    assert largest == 64 and len(trials) == 1


def test_whatever_the_truth_the_answer_ran_and_no_size_is_tried_twice():
    draw = random.Random(7)
    for _ in range(2000):
        minimum, step = draw.choice([1, 8]), draw.choice([1, 1, 4])
        first = draw.randint(minimum, 500)
        fails = draw.choice([None, first + draw.randint(1, 400)])
        maximum = draw.choice([None, first + draw.randint(0, 100)])
        truth, log = draw.randint(0, 900), []
        largest, trials = largest_that_ran(
            ran_up_to(truth, log), first=first, fails_from=fails, minimum=minimum, maximum=maximum, step=step
        )
        assert len(log) == len(set(log)) <= 6 and [each.size for each in trials] == log
        assert all(size >= minimum and (size - minimum) % step == 0 for size in log)
        assert all(maximum is None or size <= max(maximum, minimum) for size in log)
        assert all(fails is None or size < fails or size == minimum for size in log)
        fitting = [size for size in log if size <= truth]
        assert largest == max(fitting, default=None)
        assert (largest is None) == (truth < minimum)  # it never gives up without having tried the smallest


@pytest.fixture(scope="module")
def model():
    keras.backend.clear_session()
    conv = [keras.layers.Conv2D(16, 3, padding="same", activation="tanh") for _ in range(3)]
    layers = [keras.Input((64, 64, 3)), *conv, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential(layers, name="net")
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def found(model):
    return max_batch_size(
        model, device="24MB", margin=0.05, minimum=41, maximum=41, samples=45, method="formula", jit_compile=False,
        steps=2, confirm=True,
    )  # fmt: skip


def test_steps_that_do_not_fit(found):
    (trial,) = found.trials
    assert (found.largest, found.device.verdict, trial.size, trial.fits) == (None, "does not fit", 41, False)
    assert trial.limit_bytes == int(24e6 * 0.95) and trial.peak_bytes is None
    assert "ran out of memory" in trial.reason or "may end so" in trial.reason
    assert any("not even batch size 41" in note for note in found.notes)
    again = SearchResult.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found


def test_steps_that_fit(model):
    fits = max_batch_size(
        model, device="64MB", minimum=8, maximum=8, method="formula", jit_compile=False, confirm=True, steps=2
    )
    assert fits.largest == 8 and fits.trials[0].fits and 0 < fits.trials[0].peak_bytes < 64e6
    assert fits.device.verdict == "fits" and any("on the CPU" in note for note in fits.notes)


def test_nothing_of_this_process_is_touched(model):
    weights = [each.copy() for each in model.get_weights()]
    threads, optimizer = threading.active_count(), model.optimizer.iterations.numpy()
    max_batch_size(model, device="64MB", minimum=2, maximum=2, method="formula", steps=1, confirm=True)
    assert all((one == other).all() for one, other in zip(weights, model.get_weights(), strict=True))
    assert threading.active_count() == threads and model.optimizer.iterations.numpy() == optimizer


@pytest.mark.parametrize(
    ("options", "field"),
    [({"margin": 1}, "margin"), ({"margin": "much"}, "margin"), ({"steps": 0}, "steps"), ({"samples": 1.5}, "samples"),
     ({"timeout": 0}, "timeout")],
)  # fmt: skip
def test_wrong_arguments(model, options, field):
    with pytest.raises(UsageError, match=field):
        max_batch_size(model, device="64MB", method="formula", confirm=True, **options)


def test_a_model_of_this_process_alone_is_refused():
    class Own(keras.layers.Layer):
        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((4,)), Own(), keras.layers.Dense(1)])
    with pytest.raises(UsageError, match="Own"):
        max_batch_size(model, device="64MB", method="formula", confirm=True)
