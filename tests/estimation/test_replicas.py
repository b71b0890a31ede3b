"""The exchange of gradients: in the traced step, and in the report."""

from __future__ import annotations

import keras
import pytest

from kerasmem.estimation.estimating import estimate

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers
KERNELS = 4 * (64 * 256 + 5 * 256 * 256 + 256 * 8)
WEIGHTS = KERNELS + 4 * (6 * 256 + 8)


def perceptron():
    model = keras.Sequential([keras.Input((64,)), *(layers.Dense(256, "relu") for _ in range(6)), layers.Dense(8)])
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("method", ["graph", "xla"])
def test_all_gradients_and_their_buffer_are_there_at_once(method):
    single = estimate(perceptron(), batch_size=32, method=method)
    shared = estimate(perceptron(), batch_size=64, method=method, replicas=2)
    assert (shared.settings.batch_size, shared.settings.replicas) == (32, 2)
    assert shared.bytes.total == shared.pool.in_use >= 5 * WEIGHTS > single.bytes.total  # two slots, gradients, buffer
    assert f"packed into one buffer of {WEIGHTS:,} B, reduced over 2 replicas" in "; ".join(shared.notes)
    assert shared.instant.text == "while the gradients of all replicas are exchanged"
    assert [entry.what for entry in shared.unmodelled] == ["buffers of the gradient exchange"]


def test_a_peak_in_the_forward_pass_covers_the_exchange():
    keras.backend.clear_session()  # layers of the same names, as the simulation draws by them
    single = estimate(perceptron(), batch_size=20_000, method="graph")
    keras.backend.clear_session()
    shared = estimate(perceptron(), batch_size=40_000, method="graph", replicas=2)
    assert (shared.bytes.total, shared.instant) == (single.bytes.total, single.instant)


def test_under_auto_a_card_does_not_bring_xla():
    shared = estimate(perceptron(), batch_size=64, replicas=4, device="t4")
    assert shared.settings.method == "graph"
    assert any("does not compile with XLA under tf.distribute" in note for note in shared.notes)
    assert shared.device.verdict == "fits"


def test_shares_are_the_largest_and_only_training_exchanges():
    shared = estimate(perceptron(), batch_size=33, method="graph", replicas=2, mode="inference")
    assert shared.settings.batch_size == 17
    assert "17 of the 33 samples of a batch, the largest share" in shared.notes[0]
    assert shared.unmodelled == () and not any("packed" in note for note in shared.notes)
    plain = estimate(perceptron(), batch_size=64, method="formula", replicas=2)
    assert any(entry.what == "gradient exchange" for entry in plain.unmodelled)


def test_an_embeddings_gradient_is_its_rows():
    model = keras.Sequential(
        [keras.Input((16,), dtype="int32"), layers.Embedding(5000, 32), layers.Flatten(), layers.Dense(4)]
    )
    model.compile("sgd", "mse")
    shared = estimate(model, batch_size=16, method="graph", replicas=2)
    assert f"one buffer of {4 * (16 * 32 * 4 + 4):,} B" in "; ".join(shared.notes)
