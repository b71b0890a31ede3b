"""The exchange of gradients: in the traced step, and in the report."""

from __future__ import annotations

import keras
import pytest

from kerasmem.errors import UsageError
from kerasmem.estimation.facade import estimate
from kerasmem.estimation.graph.exchange import gradients_exchanged

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers
KERNELS = 4 * (64 * 256 + 5 * 256 * 256 + 256 * 8)
WEIGHTS = KERNELS + 4 * (6 * 256 + 8)


def perceptron():
    model = keras.Sequential([keras.Input((64,)), *(layers.Dense(256, "relu") for _ in range(6)), layers.Dense(8)])
    model.compile("adam", "mse")
    return model


def test_all_gradients_and_their_buffer_are_there_at_once():
    alone = estimate(perceptron(), batch_size=32, method="graph")
    found = estimate(perceptron(), batch_size=64, method="graph", replicas=2)
    assert found.settings.batch_size == 32
    assert found.settings.replicas == 2
    assert found.pool.requested >= 5 * WEIGHTS > alone.pool.requested  # weights, two slots, gradients, their buffer
    assert f"14 gradients are packed into one buffer of {WEIGHTS:,} B, reduced over 2" in "; ".join(found.notes)
    assert found.instant.text == "while the gradients of all replicas are exchanged"
    assert [each.what for each in found.unmodelled] == ["NCCL's own buffers"]


def test_under_auto_a_card_does_not_bring_xla():
    found = estimate(perceptron(), batch_size=64, replicas=4, device="t4")
    assert found.settings.method == "graph"
    assert any("does not compile with XLA under tf.distribute" in note for note in found.notes)
    assert found.device.verdict == "fits"


def test_shares_are_the_largest_and_only_training_exchanges():
    found = estimate(perceptron(), batch_size=33, method="graph", replicas=2, mode="inference")
    assert found.settings.batch_size == 17
    assert "17 of the 33 samples of a batch, the largest share" in found.notes[0]
    assert found.unmodelled == () and not any("packed" in note for note in found.notes)
    plain = estimate(perceptron(), batch_size=64, method="formula", replicas=2)
    assert any(each.what == "exchange of gradients" for each in plain.unmodelled)


def test_of_an_embeddings_gradient_rows_are_gathered():
    def words():
        model = keras.Sequential(
            [keras.Input((16,), dtype="int32"), layers.Embedding(5000, 32), layers.Flatten(), layers.Dense(4)]
        )
        model.compile("sgd", "mse")
        return model

    found = {n: estimate(words(), batch_size=8 * n, method="graph", replicas=n) for n in (2, 4)}
    gathered = {n: 8 * 16 * 32 * 4 * n for n in found}
    for n, report in found.items():
        assert f"those of all {n} replicas take {gathered[n]:,} B" in "; ".join(report.notes)
    assert found[4].bytes.total > found[2].bytes.total


def test_keras_is_left_as_it_was():
    from keras.src.backend.tensorflow.optimizer import TFOptimizer

    own = TFOptimizer._all_reduce_sum_gradients
    with pytest.raises(RuntimeError), gradients_exchanged(2):
        assert TFOptimizer._all_reduce_sum_gradients is not own
        raise RuntimeError
    assert TFOptimizer._all_reduce_sum_gradients is own


@pytest.mark.parametrize("replicas", [0, True, 2.0])
def test_replicas_are_a_whole_number(replicas):
    with pytest.raises(UsageError, match="replicas"):
        estimate(perceptron(), replicas=replicas)


def test_xla_names_the_exchange_as_unmodelled():
    found = estimate(perceptron(), batch_size=64, method="xla", replicas=2)
    assert [each.what for each in found.unmodelled] == ["exchange of gradients"]
