"""A patch of Keras or TensorFlow holds in its own thread, whatever other threads patch meanwhile."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest
import tensorflow as tf

from kerasmem.compat import keras_layers, keras_state, keras_training
from kerasmem.compat.keras_layers import gpu_assumed, name_scopes_replaced, without_name_scopes
from kerasmem.compat.keras_state import handle_only, has_value, optimizers_know_stand_ins
from kerasmem.compat.keras_training import reduction_replaced, update_in_turn
from kerasmem.compat.patching import patch
from kerasmem.compat.tensorflow_runtime import STACK, stacks_left_out
from kerasmem.models.weightless import weightless, with_stand_ins
from tests.support.programs import run_python

REDUCED = keras_training.REDUCE


def calls_replaced():
    return keras_layers.calls_replaced(lambda call, layer, *args, **kwargs: call(layer, *args, **kwargs))


PATCHES = {
    "variables": (weightless, keras_state.INIT),
    "slots": (weightless, keras_state.ADD_FROM_REFERENCE),
    "keys": (optimizers_know_stand_ins, keras_state.VAR_KEY),
    "scopes": (without_name_scopes, keras_layers.OPEN_NAME_SCOPE),
    "calls of layers": (calls_replaced, keras_layers.CALL_LAYER),
    "calls of operations": (calls_replaced, keras_layers.CALL_OPERATION),
    "cuDNN": (gpu_assumed, keras_layers.SEES_GPU),
    "losses": (lambda: reduction_replaced(lambda reduce, *args, **how: reduce(*args, **how)), REDUCED),
    "updates": (update_in_turn, keras_training.UPDATE),
    "finite": (update_in_turn, keras_training.FINITE),
    "stacks": (stacks_left_out, STACK),
}


def overlapping(first, second, look):
    """Enter `first` and then `second` in two threads, leave `first`, and return `look()` in the second thread."""
    entered, left = threading.Barrier(2), threading.Barrier(2)

    def leave_early():
        with first():
            entered.wait(60)  # the second thread enters now
            entered.wait(60)
        left.wait(60)

    def stay():
        entered.wait(60)
        with second():
            entered.wait(60)
            left.wait(60)
            return look()

    with ThreadPoolExecutor(2) as pool:
        early, late = pool.submit(leave_early), pool.submit(stay)
        early.result(120)
        return late.result(120)


@pytest.mark.parametrize("name", PATCHES)
def test_patches_of_two_threads_do_not_undo_each_other(name):
    patch, borrowed = PATCHES[name]
    original = borrowed.get()
    assert overlapping(patch, patch, borrowed.get) is not original
    assert borrowed.get() is original


def test_models_stay_weightless_when_another_thread_is_done():
    def built():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return [has_value(each) for each in (*model.variables, *model.optimizer.variables[2:])]

    assert not any(overlapping(weightless, weightless, built))
    assert all(built())


def test_patches_leave_other_threads_alone():
    class Target:
        def method(self):
            return "own"

    with patch(Target, "method", lambda original, self: f"patched {original(self)}"), ThreadPoolExecutor(1) as pool:
        assert Target().method() == "patched own"
        assert pool.submit(Target().method).result() == "own"
        with patch(Target, "method", lambda original, self: f"twice {original(self)}"):
            assert Target().method() == "twice patched own"
        assert Target().method() == "patched own"
    assert Target().method() == "own"


def test_an_inherited_attribute_is_inherited_again():
    class Base:
        def method(self):
            return "base"

    class Heir(Base):
        pass

    with contextlib.suppress(KeyError), patch(Heir, "method", lambda original, self: "patched"):
        assert (Heir().method(), Base().method()) == ("patched", "base")
        raise KeyError
    assert "method" not in vars(Heir)


def test_a_patch_put_over_it_by_someone_else_stays():
    class Target:
        def method(self):
            return "own"

    with patch(Target, "method", lambda original, self: "patched"):
        inner = Target.method
        Target.method = lambda self: f"over {inner(self)}"
        assert Target().method() == "over patched"
    assert Target().method() == "over own"
    with patch(Target, "method", lambda original, self: "patched"):
        assert Target().method() == "patched"
    assert Target().method() == "over own"


def test_stand_ins_are_given_to_the_own_models_only():
    def variable():
        return keras.Variable("zeros", shape=(2,), dtype="float32")

    with weightless(), ThreadPoolExecutor(1) as pool:

        def elsewhere():
            with weightless():
                return variable()

        here, there = variable(), pool.submit(elsewhere).result()
        with with_stand_ins(handle_only):
            assert (has_value(here), has_value(there)) == (True, False)
            late, late_there = variable(), pool.submit(elsewhere).result()
            assert (has_value(late), has_value(late_there)) == (True, False)


RANDOM_NUMBERS = """
import random
from concurrent.futures import ThreadPoolExecutor
import keras
from kerasmem.models.weightless import random_state_kept
from tests.compat.test_patching import overlapping

random.seed(7)
expected = [random.random() for _ in range(2)]
random.seed(7)

def overlap():
    random.shuffle([1, 2, 3])
    return keras.layers.Dropout(0.5)

with random_state_kept(), ThreadPoolExecutor(1) as pool:
    random.randint(0, 9)
    first = pool.submit(random.random).result()
overlapping(random_state_kept, random_state_kept, overlap)
assert [first, random.random()] == expected
"""


def test_random_numbers_of_other_threads_go_on():
    """In a process of its own, because threads of Keras's data sets draw numbers too."""
    done = run_python("-c", RANDOM_NUMBERS)
    assert done.code == 0, done.err


@pytest.mark.parametrize("name", ["without_name_scopes", "name_scopes_replaced"])
def test_a_scope_inside_another_keeps_the_outer_one(name):
    inner = {
        "without_name_scopes": without_name_scopes,
        "name_scopes_replaced": lambda: name_scopes_replaced(lambda layer, open_scope: open_scope(layer)),
    }[name]
    layer = keras.layers.Dense(2, name="refused (v2)")
    layer.build((None, 3))
    with without_name_scopes(), inner():
        assert tf.function(layer).get_concrete_function(tf.TensorSpec((1, 3))).structured_outputs.shape == (1, 2)
