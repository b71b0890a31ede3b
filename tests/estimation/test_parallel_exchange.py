"""The exchange of gradients: in the traced step, in the report, and against processes that train together."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import keras
import pytest

from kerasmem.errors import UsageError
from kerasmem.estimation.facade import estimate
from kerasmem.estimation.parallel.exchange import gradients_exchanged

pytestmark = pytest.mark.usefixtures("loaded_python")

MODEL = f"{Path(__file__).parents[1]}/support/small_models.py:perceptron"
HAS_JAX = importlib.util.find_spec("jax") is not None
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="needs pip install 'kerasmem[jax]'")
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
    assert (found.settings.replicas, found.settings.parallel) == (2, "data")
    assert found.pool.requested >= 5 * WEIGHTS > alone.pool.requested  # weights, two slots, gradients, their buffer
    assert f"14 gradients are packed into one buffer of {WEIGHTS:,} B, reduced over 2" in "; ".join(found.notes)
    assert found.instant.text == "while the gradients of all replicas are exchanged"
    assert [each.what for each in found.unmodelled] == ["NCCL's own buffers"]


def test_under_auto_a_card_does_not_bring_xla():
    found = estimate(perceptron(), batch_size=64, replicas=4, device="t4")
    assert found.settings.method == "graph"
    assert any("does not compile with XLA under tf.distribute" in note for note in found.notes)
    assert found.device.verdict == "fits"


def test_shares_that_do_not_come_out_even_are_the_largest():
    found = estimate(perceptron(), batch_size=33, method="graph", replicas=2)
    assert found.settings.batch_size == 17
    assert "17 of the 33 samples of a batch, the largest share" in found.notes[0]


def test_without_training_nothing_is_exchanged():
    found = estimate(perceptron(), batch_size=64, method="graph", replicas=2, mode="inference")
    assert found.unmodelled == () and not any("packed" in note for note in found.notes)


def test_the_formula_says_that_it_has_no_exchange():
    found = estimate(perceptron(), batch_size=64, method="formula", replicas=2)
    assert any(each.what == "exchange of gradients" for each in found.unmodelled)
    with pytest.raises(UsageError, match="JAX alone"):
        estimate(perceptron(), method="formula", replicas=2, parallel="model")


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


# Keras on JAX


def test_the_command_says_what_is_wrong(cli):
    for options, words in {
        ("--parallel", "model"): "nothing to divide",
        ("--replicas", "2", "--layout", "kernel=,model"): "needs --parallel model",
        ("--replicas", "2", "--parallel", "model", "--method", "graph"): "JAX alone",
        ("--replicas", "3", "--shard-optimizer"): "3 devices do not divide it evenly",
    }.items():
        done = cli("estimate", MODEL, *options)
        assert done.code == 2 and words in done.err, options
        assert "Traceback" not in done.err


@pytest.mark.skipif(HAS_JAX, reason="JAX is installed")
def test_without_jax_the_command_names_the_extra(cli):
    done = cli("estimate", MODEL, "--replicas", "2", "--shard-optimizer")
    assert done.code == 2 and "kerasmem[jax]" in done.err


@needs_jax
def test_a_device_has_its_shares_to_the_byte():
    whole = estimate(perceptron(), batch_size=64, method="xla", replicas=4)
    assert whole.bytes.weights == pytest.approx(WEIGHTS, abs=64)  # and what metrics have
    assert whole.bytes.optimizer == pytest.approx(2 * WEIGHTS, abs=64)
    assert whole.bytes.inputs == 16 * (64 + 8) * 4
    slots = estimate(perceptron(), batch_size=64, replicas=4, shard_optimizer=True)
    assert slots.bytes.weights == whole.bytes.weights
    assert slots.bytes.optimizer == pytest.approx(2 * WEIGHTS / 4, abs=64)
    assert "all-gather" in "; ".join(slots.notes)
    model = estimate(perceptron(), batch_size=64, replicas=4, parallel="model")
    assert model.bytes.weights == pytest.approx(KERNELS / 4 + (WEIGHTS - KERNELS), abs=64)
    assert model.bytes.inputs == 4 * whole.bytes.inputs
    assert f"all of 7 weights ({WEIGHTS - KERNELS:,} B)" in "; ".join(model.notes)
    assert (model.settings.method, model.settings.execution) == ("xla", "xla")


@needs_jax
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (["kernels=,model"], r"no variable's path is matched .* the model has"),
        ([".*kernel=model"], r"1 of the 2 dimensions of its shape \(64, 256\)"),
        ([".*kernel=,model", ".*dense.*=,model"], "matches multiple"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(layout, words):
    with pytest.raises(UsageError, match=words):
        estimate(
            MODEL,
            replicas=2,
            parallel="model",
            layout=layout,
        )


@needs_jax
def test_what_jax_cannot_run_has_a_reason_and_a_way_out(tmp_path, monkeypatch):
    (tmp_path / "of_tensorflow.py").write_text(
        "import keras\n\n\n"
        "class Own(keras.Model):\n"
        "    def train_step(self, data):\n        return {}\n\n\n"
        "def build():\n"
        "    x = keras.Input((8,))\n"
        "    return Own(x, keras.layers.Dense(4)(x))\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(UsageError, match=r"train_step of its own.*--parallel data"):
        estimate("of_tensorflow:build", replicas=2, parallel="model")
