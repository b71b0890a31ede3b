"""Small models with what recomputation may get wrong, each with a batch; built again with the same seeds each time."""

from __future__ import annotations

import keras
import numpy as np

L = keras.layers


def _numbers(*shape):
    return np.random.RandomState(0).standard_normal(shape).astype("float32")


def _targets(count):
    return np.random.RandomState(1).standard_normal((count, 1)).astype("float32")


@keras.saving.register_keras_serializable(package="kerasmem_tests")
class Penalised(L.Layer):
    """Adds a loss of its own, on what passes through."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return keras.ops.tanh(x)


@keras.saving.register_keras_serializable(package="kerasmem_tests")
class SharedNoise(L.Layer):
    """Noise without a seed of its own: all such layers draw from one state."""

    def call(self, x):
        return x * keras.random.uniform(keras.ops.shape(x), 0.5, 1.5, dtype=x.dtype)


def skips():
    """Dropout, batch normalisation and skip connections that cross every cut."""
    entry = inputs = keras.Input((16,))
    x = entry
    for number in range(3):
        y = L.Dense(16, activation="gelu", name=f"dense_{number}")(x)
        y = L.BatchNormalization(name=f"norm_{number}")(y)
        y = L.Dropout(0.3, seed=number, name=f"drop_{number}")(y)
        x = L.Add(name=f"add_{number}")([x, y])
    x = L.Concatenate(name="join")([x, entry])
    return keras.Model(inputs, L.Dense(1, name="out")(x)), _numbers(12, 16), _targets(12), ["norm_0", "add_1", "drop_2"]


def losses():
    """Regularisers of weights and of outputs, and a layer that adds a loss, inside segments."""
    first = L.Dense(8, activation="tanh", activity_regularizer="l2", kernel_regularizer="l2", name="a")
    penalty = L.ActivityRegularization(l1=0.01, name="d")
    parts = [first, Penalised(name="b"), L.Dense(8, name="c"), penalty, L.Dense(1, name="e")]
    model = keras.Sequential([keras.Input((8,)), *parts])
    return model, _numbers(6, 8), _targets(6), ["b", "d"]


def masks():
    """Masks of an embedding that recurrent layers use on the other side of cuts; a state without a seed of its own."""
    inputs = keras.Input((7,), dtype="int32")
    x = L.Embedding(20, 6, mask_zero=True, name="embed")(inputs)
    x = L.LSTM(6, return_sequences=True, name="lstm")(x)
    x = L.Dropout(0.2, seed=3, name="drop")(x)
    y = L.MultiHeadAttention(2, 3, name="attend")(x, x)
    x = L.LayerNormalization(name="norm")(L.Add(name="add")([x, y]))
    x = L.GRU(5, name="gru")(x)
    tokens = np.random.RandomState(0).randint(0, 20, (6, 7))
    tokens[:, 4:] = 0
    return keras.Model(inputs, L.Dense(1, name="out")(x)), tokens, _targets(6), ["embed", "drop", "norm"]


def shared():
    """Two inputs, two outputs, a layer that is called twice, a nested model, `keras.ops` between layers."""
    one, two = keras.Input((8,), name="one"), keras.Input((8,), name="two")
    twin = L.Dense(8, activation="relu", name="twin")
    inner_in = keras.Input((8,))
    normed = L.BatchNormalization(name="inner_norm")(inner_in)
    inner = keras.Model(inner_in, L.Dense(8, name="deep")(normed), name="inner")
    a, b = twin(one), twin(two)
    a = inner(a)
    c = keras.ops.tanh(a * 2.0 + b)
    d = L.Dense(8, activation="relu", name="d")(c)
    outputs = {
        "first": L.Dense(1, name="first")(L.Add(name="sum")([d, b])),
        "second": L.Dense(1, name="second")(d),
    }
    x = {"one": _numbers(6, 8), "two": _numbers(6, 8)[::-1].copy()}
    model = keras.Model({"one": one, "two": two}, outputs)
    return model, x, {"first": _targets(6), "second": -_targets(6)}, ["inner", "d"]


def tied():
    """One embedding for two inputs of a segment, whose gradients are of some rows alone."""
    one, two = keras.Input((5,), dtype="int32", name="one"), keras.Input((5,), dtype="int32", name="two")
    embed = L.Embedding(9, 6, name="embed")
    x = L.Subtract(name="less")([embed(one), embed(two)])
    x = L.Dense(6, activation="tanh", name="inside")(x)
    model = keras.Model({"one": one, "two": two}, L.Dense(1, name="out")(L.Flatten(name="flat")(x)))
    tokens = np.random.RandomState(2).randint(0, 9, (2, 6, 5))
    return model, {"one": tokens[0], "two": tokens[1]}, _targets(6), ["inside"]


def global_seed():
    """Noise in several segments that is drawn from one state, which none of the layers owns."""
    inputs = keras.Input((8,))
    x = L.Dense(8, name="a")(inputs)
    for number in range(3):
        x = SharedNoise(name=f"noise_{number}")(x)
        x = L.Dense(8, activation="tanh", name=f"b{number}")(x)
    return keras.Model(inputs, L.Dense(1, name="out")(x)), _numbers(6, 8), _targets(6), ["noise_0", "b1"]


def _entry():
    """The input of a model inside a model, which casts to its dtype."""
    return keras.Input((16,), dtype=keras.config.dtype_policy().compute_dtype)


def nested():
    """A model with dropout and statistics that holds a model, called between layers; the cuts are inside both."""

    def block(name, number):
        entry = _entry()
        x = L.Dense(16, activation="gelu", activity_regularizer="l2", name="dense")(entry)
        x = L.Dropout(0.3, seed=number, name="drop")(L.BatchNormalization(name="norm")(x))
        return keras.Model(entry, L.Add(name="add")([entry, x]), name=name)

    entry = _entry()
    x = L.Dense(16, activation="tanh", name="first")(block("inner", 1)(entry))
    backbone = keras.Sequential([_entry(), keras.Model(entry, x), block("last", 2)], name="backbone")
    inputs = keras.Input((16,))
    x = L.Dense(16, name="stem")(L.Rescaling(0.5, name="scale")(inputs))
    outputs = L.Dense(1, name="out")(backbone(x))
    graph = backbone.layers[0].name
    cuts = ["scale", "stem", f"backbone/{graph}/inner/norm", f"backbone/{graph}", "backbone/last/norm"]
    return keras.Model(inputs, outputs), _numbers(12, 16), _targets(12), cuts


def transfer():
    """A backbone, its lower half frozen, between layers of its own kind."""
    parts = [L.Conv2D(4, 3, name="c0"), L.BatchNormalization(name="n0"), L.Conv2D(4, 3, activation="relu", name="c1")]
    parts += [L.BatchNormalization(name="n1"), L.ReLU(name="r1")]
    backbone = keras.Sequential([keras.Input((8, 8, 2)), *parts], name="backbone")
    backbone.get_layer("c0").trainable = backbone.get_layer("n0").trainable = False
    inputs = keras.Input((8, 8, 2))
    x = L.Dropout(0.2, seed=4, name="drop")(L.GlobalAveragePooling2D(name="pool")(backbone(inputs)))
    model = keras.Model(inputs, L.Dense(1, name="out")(x))
    return model, _numbers(4, 8, 8, 2), _targets(4), ["backbone/n0", "backbone/n1", "backbone", "pool"]


MODELS = {each.__name__: each for each in (skips, losses, masks, shared, tied, global_seed, nested, transfer)}


def make(name):
    """Return (model, x, y, cuts), with the same weights each time."""
    policy = keras.config.dtype_policy()
    keras.backend.clear_session()  # Keras 3.12 keeps the shared seed generator over `set_random_seed`
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(7)
    return MODELS[name]()
