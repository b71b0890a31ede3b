"""In a segment one layer's gradient follows another's, and so the plan says what the step takes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasmem
from kerasmem.devices.kernels import EIGEN, ONEDNN
from kerasmem.errors import UsageError
from kerasmem.training.recompute.tracing import in_order

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
    for each in in_order(graph.get_operations()):
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


def products_of(graph, layer, waits):
    """The matrix products in the gradient of a layer that run."""
    run = set().union(*(waits[each.op.name] for each in graph.outputs))
    return {
        each.name
        for each in graph.get_operations()
        if each.type == "MatMul" and "gradient_tape" in each.name and f"/{layer}_1/" in each.name and each.name in run
    }


@pytest.mark.filterwarnings("ignore:kerasmem.recompute saves nothing")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_branches_wait_for_the_gradient_of_what_enters_their_segment_where_it_is_asked_for(is_frozen):
    inputs = keras.Input((8,))
    x = L.Dense(8, name="before", trainable=not is_frozen)(inputs)
    branches = [L.Dense(8, activation="tanh", name=name)(x) for name in ("one", "other")]
    model = keras.Model(inputs, L.Dense(1, name="out")(L.Add(name="add")(branches)))
    graph, waits = gradient_graph(kerasmem.recompute(model, cuts=["before", "add"]))
    one, other = (products_of(graph, name, waits) for name in ("one", "other"))
    assert len(one) == len(other) == (1 if is_frozen else 2)
    first, second = (one, other) if waits[min(other)] & one else (other, one)
    assert all(first <= waits[each] for each in second)


def residual(width=24, blocks=4):
    """Every layer has its name, since Grappler orders operations by names, and so decides which branch runs first."""
    inputs = keras.Input((24, 24, 3))
    x = L.Conv2D(width, 3, padding="same", name="stem")(inputs)
    for number in range(blocks):
        y = L.Conv2D(width, 3, padding="same", name=f"conv_{number}_0")(x)
        y = L.ReLU(name=f"relu_{number}")(L.BatchNormalization(name=f"norm_{number}_0")(y))
        y = L.Conv2D(width, 3, padding="same", name=f"conv_{number}_1")(y)
        y = L.BatchNormalization(name=f"norm_{number}_1")(y)
        x = L.BatchNormalization(name=f"norm_{number}_2")(L.Conv2D(width, 1, name=f"conv_{number}_2")(x))
        x = L.ReLU(name=f"block_{number}")(L.Add(name=f"add_{number}")([x, y]))
    return keras.Model(inputs, L.Dense(10, name="out")(L.GlobalAveragePooling2D(name="pool")(x)))


def vocabulary():
    """What the loss works on is more than all layers keep."""
    stack = [L.Dense(32, activation="gelu") for _ in range(8)]
    return keras.Sequential([keras.Input((64, 32)), *stack, L.Dense(2000)])


def grouped(width=192):
    """XLA compiles its grouped convolutions on a CPU, which work in much of their own."""
    inputs = x = keras.Input((12, 12, width))
    for _ in range(8):
        x = L.Add()([x, L.Conv2D(width, 7, padding="same", activation="relu", groups=width)(x)])
    return keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling2D()(x)))


@pytest.mark.parametrize("kernels", [ONEDNN, EIGEN])
@pytest.mark.parametrize("build", [residual, vocabulary, grouped])
def test_the_plan_says_what_the_step_takes(build, kernels, monkeypatch):
    model = build()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    monkeypatch.setattr("kerasmem.devices.kernels.onednn_is_on", lambda: kernels == ONEDNN)
    made = kerasmem.recompute(model, batch_size=64)
    assert made.cuts
    batch = tf.zeros((64, *model.input_shape[1:])), tf.zeros((64, *model.output_shape[1:-1]), "int32")
    data = tf.data.Dataset.from_tensors(batch)  # the plan knows the batch size
    taken = kerasmem.estimate(made, data=data, method="graph").pool.requested
    assert made.plan.predicted_bytes == pytest.approx(taken, rel=0.15)


def tied(same_segment):
    """Its last layer reads the weights of its first one, which no attribute of it shows."""
    inputs = keras.Input((6,), dtype="int32")
    embedding = L.Embedding(11, 8, name="embedding")

    def scores(x):
        return keras.ops.matmul(x, keras.ops.transpose(embedding.embeddings))

    x = L.Dense(8, activation="tanh", name="between")(embedding(inputs))
    x = L.Lambda(scores, output_shape=(6, 11), name="scores")(x) if same_segment else x
    for number in range(3):
        x = L.Dense(8, activation="tanh", name=f"dense_{number}")(x)
    return keras.Model(inputs, x if same_segment else L.Lambda(scores, output_shape=(6, 11), name="scores")(x))


@pytest.mark.filterwarnings("ignore:kerasmem.recompute saves nothing")
@pytest.mark.parametrize("same_segment", [True, False])
@pytest.mark.parametrize("cuts", [["dense_0"], ["between"], ["scores"]])
def test_a_weight_that_another_layer_reads_has_all_of_its_gradient(same_segment, cuts):
    if not same_segment and cuts == ["scores"]:
        cuts = ["dense_1", "dense_2"]
    keras.utils.set_random_seed(3)
    plain = tied(same_segment)
    batch = np.random.default_rng(0).integers(0, 11, (4, 6))

    def gradients(model):
        @tf.function
        def run():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(batch, training=True) ** 2)
            return tape.gradient(loss, [each.value for each in model.trainable_variables])

        return [tf.convert_to_tensor(each).numpy() for each in run()]

    wanted = gradients(plain)
    recomputed = kerasmem.recompute(plain, cuts=cuts)
    for found, right in zip(gradients(recomputed), wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-7)


class Leaves(L.Layer):
    """Leaves a tensor in an attribute."""

    def call(self, x):
        self.left = keras.ops.tanh(x)
        return x + 1


def test_a_tensor_that_is_handed_on_in_an_attribute_is_refused():
    inputs = keras.Input((8,))
    leaves = Leaves(name="leaves")
    x = L.Dense(8, name="dense")(leaves(inputs))
    outputs = L.Dense(1, name="out")(L.Lambda(lambda x: x * leaves.left, name="reads")(x))
    with pytest.raises(UsageError, match="layer 'reads' reads a tensor of another layer"):
        kerasmem.recompute(keras.Model(inputs, outputs), cuts=["dense"])
