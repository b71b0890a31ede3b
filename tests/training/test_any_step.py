"""`kerasmem.fit` of models with steps, losses and optimizers of their own, under strategies, with weights exchanged."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import kerasmem
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.errors import ModelError, UsageError
from kerasmem.training.run_state import read_state
from kerasmem.training.steps.engine import LocalEngine, RanOut

pytestmark = [
    pytest.mark.usefixtures("loaded_python"),
    pytest.mark.filterwarnings("ignore:.*does not have a `build"),
]

L = keras.layers
ROWS = 22
random = np.random.default_rng(0)
X = random.random((ROWS, 8), "float32")
Y = random.random((ROWS, 3), "float32")


class Plain(keras.Sequential):
    pass


class Vae(keras.Model):
    """As in Keras's examples: no `call`, losses tracked by hand."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = L.Dense(4), L.Dense(8)
        self.seeds = keras.random.SeedGenerator(1)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            mean, spread = ops.split(self.encoder(x), 2, axis=-1)
            code = mean + ops.exp(spread / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)
            divergence = -0.5 * ops.mean(ops.sum(1 + spread - mean**2 - ops.exp(spread), -1))
            loss = ops.mean(ops.square(self.decoder(code) - x)) + divergence
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Gan(keras.Model):
    """Two optimizers, and a `compile` of its own."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([keras.Input((8,)), L.Dense(6, "relu"), L.Dense(1)])
        self.maker = keras.Sequential([keras.Input((4,)), L.Dense(8)])
        self.seeds = keras.random.SeedGenerator(2)

    def compile(self, d_optimizer, g_optimizer, **more):
        super().compile(**more)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, real):
        noise = keras.random.normal((ops.shape(real)[0], 4), seed=self.seeds)
        with tf.GradientTape() as tape:
            d_loss = ops.mean(self.critic(self.maker(noise))) - ops.mean(self.critic(real))
        some = self.critic.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, some), some, strict=True))
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.critic(self.maker(noise)))
        some = self.maker.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, some), some, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


class Distiller(keras.Model):
    """A teacher that stays as it is, through `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.student = keras.Sequential([keras.Input((8,)), L.Dense(5, "tanh"), L.Dense(3)])
        self.teacher = keras.Sequential([keras.Input((8,)), L.Dense(3)])
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return 0.3 * own + 0.7 * ops.mean(ops.square(self.teacher(x) - y_pred))


def layers():
    return [keras.Input((8,)), L.Dense(6, "tanh"), L.Dense(3)]


def vae():
    model = Vae()
    model.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    return model, (X,)


def gan():
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01), jit_compile=False)
    return model, (X,)


def compiled(cls=Distiller, **more):
    model = cls(layers()) if issubclass(cls, keras.Sequential) else cls()
    settings = {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "jit_compile": False}
    model.compile(**{**settings, **more})
    return model, (X, Y)


def trained(make, train=kerasmem.fit, **options):
    keras.utils.set_random_seed(1)
    model, data = make()
    settings = {"batch_size": 9, "epochs": 2, "shuffle": False, "verbose": 0}
    return model, train(model, *data, **{**settings, **options}).history


def plain(model, *data, **options):
    return model.fit(*data, **options)


def assert_same(one, other, rtol=0.0):
    first, second = (read_state(model) for model, _ in (one, other))
    for mine, theirs in zip(first["model"] + first["optimizer"], second["model"] + second["optimizer"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=rtol / 10)
    assert one[1].keys() == other[1].keys()
    for key, values in one[1].items():
        np.testing.assert_allclose(values, other[1][key], rtol=rtol)


@pytest.fixture
def limited(monkeypatch):
    """Return a function after which steps on more rows run out."""

    def limit(rows):
        take = LocalEngine.step

        def step(self, kind, batch, size):
            if kind == "train" and min(size, len(keras.tree.flatten(batch)[0])) > rows:
                raise RanOut(Diagnosis(True, summary="it ran out", requested_bytes=100))
            return take(self, kind, batch, size)

        monkeypatch.setattr(LocalEngine, "step", step)

    return limit


@pytest.mark.parametrize("make", [vae, gan, compiled], ids=lambda each: each.__name__)
def test_a_step_of_its_own_trains_as_it_stands(make, tmp_path):
    assert_same(trained(make, plain), trained(make))
    file = {"checkpoint": tmp_path / "run.ckpt", "save_freq": 1}
    whole = trained(make, epochs=3)
    trained(make, epochs=2, keep=True, **file)
    assert_same(whole, trained(make, epochs=3, **file))


@pytest.mark.parametrize(
    ("make", "step"),
    [(vae, "train_step"), (compiled, "compute_loss")],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_step_of_its_own_is_not_divided(make, step, limited):
    limited(3)
    keras.utils.set_random_seed(1)
    model, data = make()
    with pytest.raises(ModelError, match=f"(?s)overrides {step}.*batch_size.*recompute") as caught:
        kerasmem.fit(model, *data, batch_size=9, verbose=0)
    assert "The model is as it was before the step" in str(caught.value)
    assert all(int(each.iterations) == 0 for each in (model.optimizer, *vars(model).values())
               if isinstance(each, keras.Optimizer))  # fmt: skip
    with pytest.raises(UsageError, match=f"overrides {step}.*smaller batch_size"):
        kerasmem.fit(model, *data, batch_size=9, verbose=0, micro_batches=3)


def test_weights_that_do_not_fit_are_told_before_the_first_step(monkeypatch):
    def fail(model, batch):
        message = "OOM when allocating tensor with shape[512,12] and type float on /device:CPU:0 by allocator cpu"
        raise tf.errors.ResourceExhaustedError(None, None, message)

    monkeypatch.setattr("kerasmem.training.trainer.build_step", fail)
    with pytest.raises(ModelError, match="not even one row"):
        trained(lambda: compiled(Plain))


def test_a_stateful_layer_is_refused_before_the_first_step():
    model = keras.Sequential([keras.Input((4, 2), batch_size=2), L.LSTM(3, stateful=True, name="carrying"), L.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(UsageError, match=r"carrying carries its state.*stateful=False"):
        kerasmem.fit(model, np.ones((4, 4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)


def test_weights_swapped_for_a_validation_are_warned_of_in_another_process():
    callback = keras.callbacks.SwapEMAWeights()
    make = functools.partial(compiled, Plain, optimizer=keras.optimizers.Adam(0.01, use_ema=True))
    with pytest.warns(RuntimeWarning, match="SwapEMAWeights does not change the weights of a validation"):
        trained(make, isolated=True, epochs=1, callbacks=[callback])


def test_a_learning_rate_set_by_a_function_at_any_batch_counts_in_another_process_too():
    def run(train, **options):
        made = []

        def make():
            made.append(compiled(Plain)[0])
            return made[0], (X, Y)

        def slow_down(batch, logs):
            made[0].optimizer.learning_rate = 0.1 / (batch + 1)

        callback = keras.callbacks.LambdaCallback(on_train_batch_begin=slow_down)
        return trained(make, train, callbacks=[callback], **options)

    assert_same(run(plain), run(kerasmem.fit, isolated=True), rtol=1e-5)


def test_a_model_under_a_strategy_is_refused_before_the_first_step():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model, data = compiled(Plain)
    with pytest.raises(UsageError, match=r"MirroredStrategy divides batches itself.*ResumeTraining"):
        kerasmem.fit(model, *data, verbose=0)
    assert model.optimizer.iterations.value.numpy() == 0


def test_a_stop_iteration_of_a_step_does_not_end_the_epoch(monkeypatch):
    def step(self, kind, batch, size):
        raise StopIteration

    monkeypatch.setattr(LocalEngine, "step", step)
    with pytest.raises(ModelError, match="StopIteration"):
        trained(lambda: compiled(Plain))
