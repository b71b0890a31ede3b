"""Models by subclassing are cut where their graph provably does the same, and refused with the reason elsewhere."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import kerasmem
from kerasmem.errors import UsageError

L = keras.layers
X = np.random.RandomState(0).standard_normal((12, 8)).astype("float32")
Y = np.random.RandomState(1).standard_normal((12, 1)).astype("float32")


class Deep(keras.Model):
    """Dropout, statistics, a skip connection, `keras.ops`, a Sequential part."""

    def __init__(self):
        super().__init__(name="deep")
        self.stem = L.Dense(8, activation="gelu", name="stem")
        self.norm = L.BatchNormalization(name="norm")
        self.drop = L.Dropout(0.3, seed=3, name="drop")
        self.body = keras.Sequential([L.Dense(8, "tanh", name=f"dense_{n}") for n in range(3)], name="body")
        self.head = L.Dense(1, name="head")

    def call(self, x, training=None):
        y = self.drop(self.norm(self.stem(x), training=training), training=training)
        return self.head(keras.ops.concatenate([self.body(y), x], axis=-1) * 2.0)


def built(kind):
    keras.utils.set_random_seed(5)
    model = kind()
    model(X)
    return model


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_training_is_the_same_to_the_bit(policy):
    keras.config.set_dtype_policy(policy)
    try:
        found = []
        for again in (False, True):
            plain = model = built(Deep)
            plain.compile(keras.optimizers.Adam(1e-2), "mse", run_eagerly=True)
            if again:
                model = kerasmem.recompute(plain, cuts=["norm", "body/dense_1"])
                assert {id(each) for each in model.variables} == {id(each) for each in plain.variables}
                assert model.cuts == ("norm", "drop", "body/dense_1")
            history = model.fit(X, Y, epochs=3, batch_size=6, shuffle=False, verbose=0)
            found.append([*plain.get_weights(), np.array(history.history["loss"]), plain.predict(X, verbose=0)])
    finally:
        keras.config.set_dtype_policy("float32")
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_is_saved_as_the_graph_of_its_layers(tmp_path):
    model = kerasmem.recompute(built(Deep), segments=3)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


class Fixed(Deep):
    def call(self, x):
        return self.head(self.drop(x, training=False))


class Branching(Deep):
    def call(self, x, training=None):
        return self.head(self.stem(x) if training else x)


class Counting(Deep):
    calls = 0

    def call(self, x):
        self.calls += 1
        return self.head(x * self.calls)


class Weighted(Deep):
    def build(self, shape):
        self.scale = self.add_weight(shape=(8,), name="scale")

    def call(self, x):
        return self.head(x * self.scale)


class Losing(Deep):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return self.head(x)


class Stepping(Deep):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Fixed, "decides itself whether 'drop' trains"),
        (Branching, "not make the same graph each time, or not whatever `training` is"),
        (Counting, "not make the same graph each time"),
        (Weighted, "uses a weight of its own"),
        (Losing, "does not work on symbolic tensors"),
        (Stepping, "its class Stepping has a train_step of its own"),
    ],
)
def test_what_is_not_provably_the_same_is_refused_with_the_reason(kind, reason):
    with pytest.raises(UsageError, match=rf"'deep' of the class {kind.__name__} cannot be cut.*{reason}"):
        kerasmem.recompute(built(kind), input_shape=(8,))
