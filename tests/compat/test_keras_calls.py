"""How Keras's methods look from a callback's hook."""

import threading

import pytest

from kerasmem.compat.keras_calls import calls_under_way


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
