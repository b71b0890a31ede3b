"""In a segment one layer's gradient follows another's, and so the plan says what the step takes."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import kerasmem

L = keras.layers


def two_branches(frozen=False):
    """Two branches that are added, as in a residual block; one may be frozen."""
    inputs = keras.Input((8,))
    one = L.Dense(8, activation="tanh", name="one", trainable=not frozen)(inputs)
    other = L.Dense(8, activation="tanh", name="other")(inputs)
    x = L.Dense(8, name="after")(L.Add(name="add")([one, other]))
    return keras.Model(inputs, L.Dense(1, name="out")(x))


def gradient_graph(model):
    """The graph of the model's gradients, and what each of its operations waits for."""

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return [
            each for each in tape.gradient(loss, [each.value for each in model.trainable_variables]) if each is not None
        ]

    graph = gradients.get_concrete_function(tf.TensorSpec((4, 8))).graph
    waits: dict[str, set[str]] = {}
    for each in graph.get_operations():
        before = [*(tensor.op for tensor in each.inputs), *each.control_inputs]
        waits[each.name] = {each.name}.union(*(waits.get(one.name, set()) for one in before))
    return graph, waits


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_branches_have_their_gradients_one_after_the_other(is_recomputed):
    model = two_branches()
    graph, waits = gradient_graph(kerasmem.recompute(model, cuts=["after"]) if is_recomputed else model)
    one, other = (
        {each.name for each in graph.get_operations() if "gradient_tape" in each.name and f"/{name}_1/" in each.name}
        for name in ("one", "other")
    )
    assert one and other
    first, second = (one, other) if waits[min(other)] & one else (other, one)
    assert bool(waits[min(second)] & first) == is_recomputed
    if is_recomputed:
        assert all(waits[each] & first for each in second), "none of it runs before"


def test_nothing_waits_for_the_gradient_of_a_frozen_branch():
    graph, waits = gradient_graph(kerasmem.recompute(two_branches(frozen=True), cuts=["after"]))
    run = set().union(*(waits[each.op.name] for each in graph.outputs))
    assert any("gradient_tape" in each and "/other_1/" in each for each in run)
    assert not any("gradient_tape" in each and "/one_1/" in each for each in run)


def residual(width=24, blocks=4):
    inputs = keras.Input((24, 24, 3))
    x = L.Conv2D(width, 3, padding="same", name="stem")(inputs)
    for number in range(blocks):
        y = L.ReLU()(L.BatchNormalization()(L.Conv2D(width, 3, padding="same")(x)))
        y = L.BatchNormalization()(L.Conv2D(width, 3, padding="same")(y))
        x = L.ReLU(name=f"block_{number}")(L.Add()([L.BatchNormalization()(L.Conv2D(width, 1)(x)), y]))
    return keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling2D()(x)))


def vocabulary():
    """What the loss works on is more than all layers keep."""
    stack = [L.Dense(32, activation="gelu") for _ in range(8)]
    return keras.Sequential([keras.Input((64, 32)), *stack, L.Dense(2000)])


def gated(width=64):
    """Tensors that wait for their gradient, of which a part is there, while others have theirs."""
    inputs = x = keras.Input((32, width))
    for _ in range(6):
        x = L.Add()([x, L.Multiply()([L.Dense(width, "tanh")(x), L.Dense(width, "sigmoid")(x)])])
    return keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling1D()(x)))


@pytest.mark.parametrize("build", [residual, vocabulary, gated])
def test_the_plan_says_what_the_tensors_of_the_step_take(build):
    model = build()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    made = kerasmem.recompute(model, batch_size=64)
    assert made.cuts
    taken = kerasmem.estimate(made, batch_size=64, method="graph").pool.requested
    assert made.plan.predicted_bytes == pytest.approx(taken, rel=0.15)
