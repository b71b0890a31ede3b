"""What a step in micro-batches holds beside the model: it is given back, and updates come one after another."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("loaded_python")
ALLOCATOR = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"
LIMITED = {**ALLOCATOR, LIMIT: "28"}
MODEL = """
import json, sys, warnings
import keras, numpy as np, tensorflow as tf
import kerasmem

keras.utils.set_random_seed(0)
L = keras.layers
x, y = np.random.rand(2048, 16).astype("float32"), np.random.rand(2048, 1).astype("float32")
model = keras.Sequential([keras.Input((16,)), *[L.Dense(448, "relu") for _ in range(8)], L.Dense(1)])
scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.001))
"""
HELD = """
from kerasmem.training.steps.engine import LocalEngine

for optimizer in ("sgd", scaled):
    model.compile(optimizer, "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    engine, batch = LocalEngine(model), (tf.constant(x[:64]), tf.constant(y[:64]))
    state, in_use = engine.state(), []
    for _ in range(3):
        in_use.append(tf.config.experimental.get_memory_info("CPU:0")["current"])
        engine.step("train", batch, 16)
        engine.load(state)
    assert max(in_use) - in_use[0] < model.count_params(), "less than a quarter of a set of gradients"
print("true")
"""
TRAINED = """
model.compile(scaled, "mse", jit_compile=False)
train = kerasmem.fit if sys.argv[1:] else lambda model, *all_, **more: model.fit(*all_, **more)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    train(model, x, y, batch_size=1024, shuffle=False, verbose=0)
weights = [[float(each.sum()), float(np.square(each).sum())] for each in map(np.float64, model.get_weights())]
print(json.dumps([sum("ran out of memory" in str(each.message) for each in said), weights]))
"""
UPDATED = """
import contextlib, json, multiprocessing, sys
import keras, numpy as np, tensorflow as tf
from kerasmem.compat.keras_training import update_in_turn

optimizers, memory = keras.optimizers, tf.config.experimental


def updated(expression, is_in_turn):
    keras.utils.set_random_seed(0)
    weights, gradients = ([tf.Variable(np.random.rand(256, 256).astype("float32")) for _ in range(12)] for _ in "wg")
    optimizer = eval(expression)
    optimizer.build(weights)

    @tf.function(autograph=False)
    def update():
        with update_in_turn() if is_in_turn else contextlib.nullcontext():
            optimizer.apply([each.read_value() for each in gradients], weights)

    update()
    before = memory.get_memory_info("CPU:0")["current"]
    memory.reset_memory_stats("CPU:0")
    for _ in range(5):  # how many are worked on at once hangs on threads
        update()
    most = (memory.get_memory_info("CPU:0")["peak"] - before) // 2**18  # whole ones: some numbers are beside them
    return most, [float(np.float64(each).sum()) for each in [*weights, *optimizer.variables[2:]]]


def compared(expression):
    (at_once, weights), (in_turn, others) = updated(expression, False), updated(expression, True)
    return at_once, in_turn, weights == others


with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # an allocator for each
    print(json.dumps(pool.map(compared, sys.argv[1:], chunksize=1)))
"""


def told(program, text, *arguments, env=ALLOCATOR):
    done = program("-c", text, *arguments, env=env)
    assert done.out, done.err[-3000:]
    return json.loads(done.out.splitlines()[-1])


def test_accumulators_are_given_back(program):
    assert told(program, MODEL + HELD)


@pytest.mark.flaky(reruns=2, reason="other work on the machine changes which operations overlap")
def test_a_scaled_loss_trains_where_no_further_set_of_gradients_fits(program):
    failures, weights = told(program, MODEL + TRAINED, "limited", env=LIMITED)
    assert 1 <= failures <= 2
    _, whole = told(program, MODEL + TRAINED)
    np.testing.assert_allclose(weights, whole, rtol=1e-5)


UNSCALED = (
    "optimizers.LossScaleOptimizer(optimizers.Adam(0.01, global_clipnorm=0.1), initial_scale=8.0)",
    "optimizers.AdamW(0.01, clipnorm=0.1)",
    "optimizers.SGD(0.01, clipvalue=0.1, loss_scale_factor=8.0)",
)


@pytest.mark.flaky(reruns=2, reason="other work on the machine changes which operations overlap")
def test_gradients_are_made_one_after_another_and_as_keras_makes_them(program):
    found = told(program, UPDATED, *UNSCALED)
    for optimizer, (at_once, in_turn, is_equal) in zip(UNSCALED, found, strict=True):
        assert is_equal, optimizer
        assert in_turn <= 4 < 8 < at_once, f"variables' worth, of twelve: {optimizer}"
