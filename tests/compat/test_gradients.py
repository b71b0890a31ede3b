"""TensorFlow's gradient registry behaves as `kerasmem.compat.gradients` takes it to, and loses the unneeded only."""

from __future__ import annotations

import gc
import threading

import pytest
import tensorflow as tf

from kerasmem.compat import gradients


@tf.custom_gradient
def doubled(x):
    """Return 2 x, with a gradient of 5 and not 2, so that it is seen who computed it."""

    def backwards(upstream):
        return 5 * upstream

    return 2 * x, backwards


@tf.custom_gradient
def fourth_power(x):
    """Return x ** 4, with a gradient that can be differentiated further."""
    return x**4, lambda upstream: upstream * 4 * x**3


def traced(body=doubled):
    """Return a new function around a custom gradient, and the entries that its tracing made."""
    before = gradients.custom_gradients().keys()
    function = tf.function(body)
    function.get_concrete_function(tf.TensorSpec((), "float32"))
    return function, gradients.custom_gradients().keys() - before


def free():
    """Free twice, as a function whose graph TensorFlow took apart names none before the second time."""
    gradients.free_unneeded_gradients()
    gradients.free_unneeded_gradients()


@pytest.fixture(autouse=True)
def nothing_is_left_over():
    yield
    free()


def slope(function, at=3.0):
    x = tf.constant(at)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return float(tape.gradient(y, x))


def test_the_entry_of_a_function_that_is_gone_goes_and_others_stay_the_same_objects():
    kept, of_kept = traced()
    lost, of_lost = traced()
    before = {name: gradients.custom_gradients()[name] for name in of_kept}
    del lost
    free()
    after = gradients.custom_gradients()
    assert not of_lost & after.keys()
    assert all(after[name] is before[name] for name in of_kept)
    assert slope(kept) == 5


def test_a_function_that_was_never_differentiated_can_be_later_and_higher_orders_too():
    function, _ = traced(fourth_power)
    gradients.free_unneeded_gradients()
    x = tf.constant(2.0)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = function(x)
        first = inner.gradient(y, x)
        gradients.free_unneeded_gradients()
    assert float(first) == 32
    assert float(outer.gradient(first, x)) == 48


def test_a_function_inside_another_and_inside_branches_and_loops_keeps_its_gradient():
    @tf.function
    def inner(x):
        return doubled(x)

    @tf.function
    def outer(x, n):
        for _ in tf.range(n):
            x = inner(x) if x > 0 else doubled(x) + 1.0
        return x

    x, n = tf.constant(3.0), tf.constant(2)
    outer(x, n)
    free()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = outer(x, n)
    assert float(tape.gradient(y, x)) == 25


def test_a_recorded_step_can_be_differentiated_after_its_function_is_gone():
    function, _ = traced()
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    del function
    free()
    assert float(tape.gradient(y, x)) == 5


def test_a_saved_model_keeps_its_gradients_through_export_loading_and_freeing(tmp_path):
    module = tf.Module()
    module.work = tf.function(doubled, input_signature=[tf.TensorSpec((), "float32")])
    gradients.free_unneeded_gradients()
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(tmp_path), options=options)
    del module
    loaded = tf.saved_model.load(str(tmp_path))
    free()
    assert slope(loaded.work) == 5
    tf.saved_model.save(loaded, str(tmp_path / "again"), options=options)


def test_a_graph_that_gc_freeze_hides_keeps_its_gradient():
    function, new = traced()
    gc.freeze()
    try:
        free()
    finally:
        gc.unfreeze()
    assert new <= gradients.custom_gradients().keys()
    assert slope(function) == 5


def test_a_copy_of_a_graph_keeps_the_gradient_of_the_original():
    with tf.Graph().as_default() as original:
        doubled(tf.constant(3.0))
    definition = original.as_graph_def()
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(definition, name="")
    name = next(gradients._gradients_in(copy))
    del original
    free()
    assert name in gradients.custom_gradients()


def test_a_gradient_without_a_graph_yet_is_left_for_the_next_call():
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import custom_gradient

    name = custom_gradient.generate_name()

    def made(*_):
        raise AssertionError

    made.__module__ = custom_gradient.__name__
    ops.RegisterGradient(name)(made)  # another thread is between this and its operation
    del made
    gradients.free_unneeded_gradients()
    assert name in gradients.custom_gradients()
    gradients.free_unneeded_gradients()
    assert name not in gradients.custom_gradients()


def test_a_users_own_gradient_stays():
    name = "CustomGradient-of-mine"
    tf.RegisterGradient(name)(lambda *_: None)
    free()
    from tensorflow.python.framework import ops

    assert ops.gradient_registry.lookup(name) is not None


def test_gradients_are_right_while_another_thread_frees():
    ends, wrong = threading.Event(), []

    def free():
        while not ends.is_set():
            gradients.free_unneeded_gradients()

    thread = threading.Thread(target=free)
    thread.start()
    try:
        for _ in range(4):
            function, _ = traced(fourth_power)
            wrong += [found for found in (slope(function, 2.0),) if found != 32]
    finally:
        ends.set()
        thread.join()
    assert not wrong


def test_the_gradients_of_a_graph_that_nobody_differentiates_can_be_forgotten():
    kept, of_kept = traced()
    lost, of_lost = traced()
    gradients.forget_gradients(lost.get_concrete_function(tf.TensorSpec((), "float32")).graph)
    assert of_kept <= gradients.custom_gradients().keys()
    assert not of_lost & gradients.custom_gradients().keys()
    assert slope(kept) == 5
