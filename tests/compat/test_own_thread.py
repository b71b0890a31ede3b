"""What Keras is told for a trace holds in the thread that traces: another one may be training meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import keras
import tensorflow as tf

from kerasmem.compat.graphs import stacks_left_out
from kerasmem.compat.keras_layers import SEES_GPU, gpu_assumed
from kerasmem.compat.keras_optimizers import gradients_summed_by


def elsewhere(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_gpu_is_assumed():
    is_there = SEES_GPU.get()()
    with gpu_assumed():
        assert SEES_GPU.get()()
        assert elsewhere(lambda: SEES_GPU.get()()) == is_there


def test_stacks_are_left_out():
    def is_told_where():
        with tf.Graph().as_default():
            return any(each.name == "is_told_where" for each in tf.constant(1).op.traceback)

    with stacks_left_out():
        assert (is_told_where(), elsewhere(is_told_where)) == (False, True)
    assert is_told_where()


def test_gradients_are_summed():
    optimizer, pairs = keras.optimizers.SGD(), [(tf.constant(1.0), tf.Variable(1.0))]
    with gradients_summed_by(lambda given: []):
        assert optimizer._all_reduce_sum_gradients(pairs) == []
        assert len(elsewhere(lambda: optimizer._all_reduce_sum_gradients(pairs))) == 1
