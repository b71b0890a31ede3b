"""How Keras's methods look from a callback's hook, and how a model's saving is watched."""

import contextlib
import threading

import pytest

from kerasmem.compat.keras_calls import calls_under_way, stop_watching_saving, watch_saving


class Counter:
    """Counts how often a model saves itself, and how often it is at it."""

    def __init__(self):
        self.count = self.inside = 0

    @contextlib.contextmanager
    def saving(self):
        self.count, self.inside = self.count + 1, self.inside + 1
        yield
        self.inside -= 1


@pytest.fixture(scope="module")
def model():
    import keras

    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def seen(model, method, **arguments):
    """What `calls_under_way` yields in the first hook of each kind."""
    import keras

    found = []

    class Look(keras.callbacks.Callback):
        def look(self, *args, **options):
            found.append((list(calls_under_way(method)), threading.get_ident()))

        on_train_begin = on_test_begin = on_predict_begin = on_train_batch_end = look

    getattr(model, method)(verbose=0, callbacks=[Look()], **arguments)
    return found


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_keras_calls_its_hooks_in_a_function_of_that_name_whose_callbacks_are_a_list_of_its_own(model, method):
    import numpy as np

    x, y = np.ones((4, 2)), np.ones((4, 1))
    data = {"x": x} if method == "predict" else {"x": x, "y": y}
    (calls, thread), *_ = seen(model, method, **data)
    assert len(calls) == 1 and calls[0]["x"] is x
    assert type(calls[0]["callbacks"]).__name__ == "CallbackList"
    assert thread == threading.get_ident(), "hooks run in the thread that called"
    assert list(calls_under_way(method)) == []


def test_a_users_own_function_of_that_name_is_none():
    def fit(callbacks):
        return list(calls_under_way("fit"))

    assert fit([]) == []


def test_saving_is_seen_on_the_model_that_is_watched(model, tmp_path):
    counter = Counter()
    watch_saving(model, counter)
    watch_saving(model, counter)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    assert (counter.count, counter.inside) == (2, 0)
    stop_watching_saving(model, counter)
    stop_watching_saving(model, counter)
    assert "save" not in vars(model)
    model.save(tmp_path / "model.keras")
    assert counter.count == 2


def test_saving_has_several_watchers_and_forgets_those_that_are_gone(model, tmp_path):
    first, second = Counter(), Counter()
    watch_saving(model, first)
    watch_saving(model, second)
    stop_watching_saving(model, first)
    model.save(tmp_path / "model.keras")
    assert (first.count, second.count) == (0, 1)
    del second
    model.save(tmp_path / "model.keras")
    assert "save" not in vars(model) and "save_weights" in vars(model)
    stop_watching_saving(model, first)
    assert "save_weights" not in vars(model)


def test_a_method_that_somebody_else_put_on_the_model_stays(model):
    asked = []
    model.save = lambda *args: asked.append(args)
    counter = Counter()
    watch_saving(model, counter)
    model.save("here")
    stop_watching_saving(model, counter)
    model.save("there")
    assert asked == [("here",), ("there",)] and counter.count == 1
    del model.save
