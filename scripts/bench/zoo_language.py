"""Keras's published examples on text, tables, graphs, sound and time series, rebuilt at small size: compiled."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from zoo_vision import Patches, compiled, encoder_block

layers, ops = keras.layers, keras.ops


def tokens(length: int, name: str | None = None) -> Any:
    return keras.Input((length,), dtype="int32", name=name)


class TokensAndPositions(layers.Layer):
    """Learnt vectors for tokens and for their positions, added."""

    def __init__(self, length: int, words: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = layers.Embedding(words, width), layers.Embedding(length, width)

    def call(self, x: Any) -> Any:
        return self.words(x) + self.positions(ops.arange(0, ops.shape(x)[-1], 1))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return ops.not_equal(inputs, 0)


class TransformerBlock(layers.Layer):
    """Attention and a feed-forward network; `causal` as a language model has it."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.network = keras.Sequential([layers.Dense(width * 2, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.drops = [layers.Dropout(0.1) for _ in range(2)]

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.attention(x, x, use_causal_mask=self.causal)
        x = self.norms[0](x + self.drops[0](y, training=training))
        return self.norms[1](x + self.drops[1](self.network(x), training=training))


def text_from_scratch() -> Any:
    x = layers.Dropout(0.5)(layers.Embedding(5000, 64)(text := keras.Input((None,), dtype="int64")))
    for _ in range(2):
        x = layers.Conv1D(64, 7, padding="valid", activation="relu", strides=3)(x)
    x = layers.Dropout(0.5)(layers.Dense(64, activation="relu")(layers.GlobalMaxPooling1D()(x)))
    return compiled(keras.Model(text, layers.Dense(1, activation="sigmoid")(x)), "binary_crossentropy")


def bidirectional_lstm() -> Any:
    text = keras.Input((None,), dtype="int32")
    x = layers.Bidirectional(layers.LSTM(32, return_sequences=True))(layers.Embedding(5000, 64)(text))
    x = layers.Bidirectional(layers.LSTM(32))(x)
    return compiled(keras.Model(text, layers.Dense(1, activation="sigmoid")(x)), "binary_crossentropy")


def text_transformer() -> Any:
    text = tokens(64)
    x = TransformerBlock(32, 2)(TokensAndPositions(64, 5000, 32)(text))
    x = layers.Dense(20, activation="relu")(layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x)))
    return compiled(keras.Model(text, layers.Dense(2, activation="softmax")(x)))


class Switch(layers.Layer):
    """A mixture of experts: each token goes to one, up to its capacity; the balance is a loss of its own."""

    def __init__(self, experts: int, capacity: int, width: int) -> None:
        super().__init__()
        self.experts = [keras.Sequential([layers.Dense(width * 2, activation="relu"), layers.Dense(width)])
                        for _ in range(experts)]  # fmt: skip
        self.route, self.capacity, self.width = layers.Dense(experts), capacity, width

    def call(self, x: Any) -> Any:
        count, shape = len(self.experts), ops.shape(x)
        flat = ops.reshape(x, (-1, self.width))
        chances = keras.activations.softmax(self.route(flat), axis=-1)
        gate, index = ops.top_k(chances, k=1)
        mask = ops.one_hot(ops.squeeze(index, 1), count)
        self.add_loss(ops.mean(ops.mean(mask, axis=0) * ops.mean(chances, axis=0)) * count**2)
        place = ops.cast(ops.cumsum(mask, axis=0) * mask, "int32")
        mask *= ops.cast(ops.less(place - 1, self.capacity), "float32")
        flat_mask = ops.sum(mask, axis=-1)
        where = ops.squeeze(ops.max(place * ops.cast(mask, "int32"), axis=-1, keepdims=True), -1)
        combine = ops.expand_dims(gate * mask * ops.expand_dims(flat_mask, -1), -1) * ops.expand_dims(
            ops.one_hot(where, self.capacity), 1
        )
        dispatch = ops.cast(combine, "bool")
        inputs = ops.einsum("ab,acd->cdb", flat, ops.cast(dispatch, "float32"))
        made = ops.stack([expert(inputs[place]) for place, expert in enumerate(self.experts)])
        return ops.reshape(ops.einsum("abc,xab->xc", made, combine), shape)


def switch_transformer() -> Any:
    text = tokens(32)
    x = TokensAndPositions(32, 5000, 32)(text)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.MultiHeadAttention(2, 32)(x, x))
    x = layers.LayerNormalization(epsilon=1e-6)(x + Switch(4, 64, 32)(x))
    x = layers.Dense(32, activation="relu")(layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(text, layers.Dense(2, activation="softmax")(x)))


class TokenLoss(keras.losses.Loss):
    """Cross-entropy of the tokens that are not padding."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        loss = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=False)
        mask = ops.cast(y_true > 0, loss.dtype)
        return ops.sum(loss * mask) / ops.sum(mask)


def named_entities() -> Any:
    text = tokens(48)
    x = TransformerBlock(32, 4)(TokensAndPositions(48, 5000, 32)(text))
    x = layers.Dense(32, activation="relu")(layers.Dropout(0.1)(x))
    return compiled(keras.Model(text, layers.Dense(10, activation="softmax")(x)), TokenLoss(name="sparse_tokens"))


def sequence_to_sequence() -> Any:
    source, target = keras.Input((None, 64), name="source"), keras.Input((None, 80), name="target")
    _, *states = layers.LSTM(96, return_state=True)(source)
    x, _, _ = layers.LSTM(96, return_sequences=True, return_state=True)(target, initial_state=states)
    model = keras.Model([source, target], layers.Dense(80, activation="softmax")(x))
    return compiled(model, "categorical_crossentropy", "rmsprop")


def translation() -> Any:
    source, target = tokens(20, "encoder_inputs"), tokens(20, "decoder_inputs")
    encoded = TransformerBlock(64, 4)(TokensAndPositions(20, 3000, 64)(source))
    x = TokensAndPositions(20, 3000, 64)(target)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(query=x, value=encoded, key=encoded))
    x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, activation="relu")(x)))
    model = keras.Model([source, target], layers.Dense(3000, activation="softmax")(layers.Dropout(0.5)(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    return compiled(model, loss, "rmsprop", metrics=["accuracy"])


def addition() -> Any:
    layers_ = [keras.Input((7, 12)), layers.LSTM(64), layers.RepeatVector(4), layers.LSTM(64, return_sequences=True),
               layers.Dense(12, activation="softmax")]  # fmt: skip
    return compiled(keras.Sequential(layers_), "categorical_crossentropy")


def question_answering() -> Any:
    ids, types, mask = tokens(48, "ids"), tokens(48, "types"), tokens(48, "mask")
    x = TokensAndPositions(48, 5000, 64)(ids) + layers.Embedding(2, 64)(types)
    visible = layers.Reshape((1, 1, 48))(mask)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x, attention_mask=visible))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, activation="gelu")(x)))
    ends = [layers.Activation("softmax")(layers.Flatten()(layers.Dense(1, use_bias=False)(x))) for _ in range(2)]
    return compiled(keras.Model([ids, types, mask], ends), ["sparse_categorical_crossentropy"] * 2)


def miniature_gpt() -> Any:
    text = tokens(40)
    x = TransformerBlock(64, 2, causal=True)(TokensAndPositions(40, 5000, 64)(text))
    model = keras.Model(text, [layers.Dense(5000)(x), x])
    return compiled(model, [keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])


class TiedDecoder(keras.Model):
    """A language model whose last layer is its embedding, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(4000, 64)
        self.blocks = [TransformerBlock(64, 4, causal=True) for _ in range(2)]

    def call(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def tied_embeddings() -> Any:
    return compiled(TiedDecoder(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), "adamw")


def fourier_network() -> Any:
    class Fourier(layers.Layer):
        def call(self, x: Any) -> Any:
            return ops.fft2((x, ops.zeros_like(x)))[0]

    text = tokens(32)
    x = TokensAndPositions(32, 5000, 64)(text)
    for _ in range(2):
        x = layers.LayerNormalization()(x + Fourier()(x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, activation="relu")(x)))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(text, layers.Dense(1, activation="sigmoid")(x)), "binary_crossentropy")


def gated_mlp() -> Any:
    image = keras.Input((32, 32, 3))
    x = layers.Dense(64)(Patches(4)(image))
    for _ in range(2):
        u, v = ops.split(layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x)), 2, axis=-1)
        v = layers.Permute((2, 1))(layers.Dense(64, bias_initializer="ones")(layers.Permute((2, 1))(v)))
        x = layers.Add()([x, layers.Dense(64)(u * v)])
    return compiled(keras.Model(image, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x))))


# Tables and recommendations.


def wide_and_deep() -> Any:
    numbers = [keras.Input((1,), name=f"number{place}") for place in range(6)]
    kinds = [keras.Input((1,), name=f"kind{place}", dtype="int32") for place in range(3)]
    wide = layers.BatchNormalization()(layers.Concatenate()(
        [*numbers, *(layers.CategoryEncoding(20, output_mode="multi_hot")(each) for each in kinds)]
    ))  # fmt: skip
    deep = layers.Concatenate()([*numbers, *(layers.Flatten()(layers.Embedding(20, 5)(each)) for each in kinds)])
    for _ in range(3):
        deep = layers.Dropout(0.1)(layers.ReLU()(layers.BatchNormalization()(layers.Dense(32)(deep))))
    merged = layers.concatenate([wide, deep])
    return compiled(keras.Model([*numbers, *kinds], layers.Dense(7, activation="softmax")(merged)))


def tab_transformer() -> Any:
    kinds, numbers = tokens(8), keras.Input((5,))
    x = layers.Embedding(100, 16)(kinds) + layers.Embedding(8, 16)(ops.arange(8))
    for _ in range(2):
        x = encoder_block(x, 4, 16)
    x = layers.Concatenate()([layers.Flatten()(x), layers.LayerNormalization()(numbers)])
    for width in (128, 64):
        x = layers.Dropout(0.2)(layers.Dense(width, activation="selu")(layers.BatchNormalization()(x)))
    return compiled(keras.Model([kinds, numbers], layers.Dense(1, activation="sigmoid")(x)), "binary_crossentropy")


class GatedResidual(layers.Layer):
    """Two layers, a gated linear unit, dropout, a way around."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units
        self.elu, self.linear, self.drop = (
            layers.Dense(units, activation="elu"),
            layers.Dense(units),
            layers.Dropout(0.1),
        )
        self.gate = [layers.Dense(units), layers.Dense(units, activation="sigmoid")]
        self.norm, self.project = layers.LayerNormalization(), layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        x = self.drop(self.linear(self.elu(inputs)))
        around = self.project(inputs) if inputs.shape[-1] != self.units else inputs
        return self.norm(around + self.gate[0](x) * self.gate[1](x))


def variable_selection() -> Any:
    inputs = [keras.Input((1,), name=f"feature{place}") for place in range(8)]
    encoded = [layers.Dense(16)(each) for each in inputs]
    weights = layers.Dense(8, activation="softmax")(GatedResidual(16)(layers.concatenate(encoded)))
    stacked = ops.stack([GatedResidual(16)(each) for each in encoded], axis=1)
    x = ops.squeeze(ops.matmul(ops.expand_dims(weights, 1), stacked), axis=1)
    return compiled(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x)), "binary_crossentropy")


class RecommenderNet(keras.Model):
    """Users and films meet in a dot product."""

    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        self.user, self.film = layers.Embedding(users, 50), layers.Embedding(films, 50)
        self.user_bias, self.film_bias = layers.Embedding(users, 1), layers.Embedding(films, 1)

    def call(self, pair: Any) -> Any:
        dot = ops.tensordot(self.user(pair[:, 0]), self.film(pair[:, 1]), 2)
        return ops.nn.sigmoid(dot + self.user_bias(pair[:, 0]) + self.film_bias(pair[:, 1]))


def collaborative_filtering() -> Any:
    return compiled(RecommenderNet(2000, 3000), keras.losses.BinaryCrossentropy())


def behaviour_sequence() -> Any:
    films, ratings, user = tokens(7, "films"), keras.Input((7,), name="ratings"), tokens(1, "user")
    x = layers.Embedding(3000, 32)(films) + layers.Embedding(7, 32)(ops.arange(7))
    x = layers.multiply([x, layers.Reshape((7, 1))(ratings)])
    y = layers.Dropout(0.1)(layers.MultiHeadAttention(3, 32, dropout=0.1)(x, x))
    x = layers.LayerNormalization()(layers.Add()([x, y]))
    x = layers.concatenate(
        [layers.Flatten()(layers.LeakyReLU()(x)), layers.Flatten()(layers.Embedding(2000, 16)(user))]
    )
    for width in (64, 32):
        x = layers.Dropout(0.1)(layers.LeakyReLU()(layers.BatchNormalization()(layers.Dense(width)(x))))
    return compiled(keras.Model([films, ratings, user], layers.Dense(1)(x)), "mse", "adagrad")


class DecisionTree(keras.Model):
    """A tree whose decisions are made by a layer, and whose leaves are learnt."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        self.depth = depth
        self.decide = layers.Dense(2**depth, activation="sigmoid")
        self.leaves = self.add_weight(shape=(2**depth, classes), initializer="random_normal", name="leaves")

    def call(self, features: Any) -> Any:
        batch = ops.shape(features)[0]
        decisions = ops.expand_dims(self.decide(features), axis=2)
        decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
        reached, begin = ops.ones((batch, 1, 1)), 1
        for level in range(self.depth):
            reached = ops.tile(ops.reshape(reached, (batch, -1, 1)), (1, 1, 2))
            reached = reached * decisions[:, begin : begin + 2**level, :]
            begin += 2**level
        return ops.matmul(ops.reshape(reached, (batch, 2**self.depth)), keras.activations.softmax(self.leaves))


def decision_forest() -> Any:
    features = keras.Input((20,))
    x = layers.BatchNormalization()(features)
    return compiled(keras.Model(features, layers.Average()([DecisionTree(5, 3)(x) for _ in range(4)])))


# Time series and sound.


def series_transformer() -> Any:
    series = keras.Input((128, 1))
    x = series
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-6)(layers.MultiHeadAttention(4, 64, dropout=0.25)(x, x)) + x
        z = layers.Conv1D(1, 1)(layers.Dropout(0.25)(layers.Conv1D(4, 1, activation="relu")(y)))
        x = layers.LayerNormalization(epsilon=1e-6)(z) + y
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    return compiled(keras.Model(series, layers.Dense(2, activation="softmax")(layers.Dense(128, activation="relu")(x))))


def weather() -> Any:
    series = keras.Input((120, 7))
    return compiled(keras.Model(series, layers.Dense(1)(layers.LSTM(32)(series))), "mse")


def anomaly_autoencoder() -> Any:
    made = [keras.Input((288, 1)),
            layers.Conv1D(32, 7, padding="same", strides=2, activation="relu"), layers.Dropout(0.2),
            layers.Conv1D(16, 7, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(16, 7, padding="same", strides=2, activation="relu"), layers.Dropout(0.2),
            layers.Conv1DTranspose(32, 7, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(1, 7, padding="same")]  # fmt: skip
    return compiled(keras.Sequential(made), "mse")


def speaker_recognition() -> Any:
    sound = keras.Input((2000, 1))
    x = sound
    for width, count in ((16, 2), (32, 2), (64, 3)):
        kept = layers.Conv1D(width, 1, padding="same")(x)
        for _ in range(count - 1):
            x = layers.Activation("relu")(layers.Conv1D(width, 3, padding="same")(x))
        x = layers.Activation("relu")(layers.Add()([layers.Conv1D(width, 3, padding="same")(x), kept]))
        x = layers.MaxPooling1D(2, 2)(x)
    x = layers.Flatten()(layers.AveragePooling1D(3, 3)(x))
    return compiled(keras.Model(sound, layers.Dense(5, activation="softmax")(layers.Dense(64, activation="relu")(x))))


def speech_ctc() -> Any:
    """As DeepSpeech2, with a loss of the user's own."""

    def ctc(y_true: Any, y_pred: Any) -> Any:
        one = ops.ones((ops.shape(y_true)[0],), dtype="int32")
        return ops.ctc_loss(y_true, y_pred, ops.shape(y_true)[1] * one, ops.shape(y_pred)[1] * one)

    spectrum = keras.Input((None, 65))
    x = layers.Reshape((-1, 65, 1))(spectrum)
    for kernel in ((11, 21), (11, 11)):
        x = layers.Conv2D(8, kernel, strides=(1, 2), padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Reshape((-1, x.shape[-2] * x.shape[-1]))(x)
    for _ in range(2):
        x = layers.Dropout(0.5)(layers.Bidirectional(layers.GRU(32, return_sequences=True, reset_after=True))(x))
    return compiled(keras.Model(spectrum, layers.Dense(32, activation="softmax")(x)), ctc)


# Graphs.


class GraphConvolution(layers.Layer):
    """Messages of neighbours, summed or averaged, and what each node makes of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.prepare, self.update = layers.Dense(width, activation="gelu"), layers.Dense(width, activation="gelu")

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        targets, sources = edges[0], edges[1]
        messages = self.prepare(ops.take(nodes, sources, axis=0))
        gathered = tf.math.unsorted_segment_mean(messages, targets, num_segments=ops.shape(nodes)[0])
        return self.update(ops.concatenate([nodes, gathered], axis=-1))


class CitationNetwork(keras.Model):
    """A graph that is part of the model; a batch is a list of its nodes."""

    def __init__(self, nodes: int = 500, edges: int = 2000) -> None:
        super().__init__()
        self.features = tf.random.normal((nodes, 64), seed=1)
        self.edges = tf.random.uniform((2, edges), 0, nodes, dtype=tf.int32, seed=1)
        self.before, self.after = layers.Dense(32, activation="gelu"), layers.Dense(32, activation="gelu")
        self.convolutions = [GraphConvolution(32) for _ in range(2)]
        self.head = layers.Dense(7)

    def call(self, wanted: Any) -> Any:
        x = self.before(self.features)
        for each in self.convolutions:
            x = each((x, self.edges)) + x
        return self.head(ops.take(self.after(x), ops.squeeze(wanted, -1), axis=0))


def citations() -> Any:
    return compiled(CitationNetwork(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class GraphAttention(layers.Layer):
    """Each edge gets a score; a node's scores are normalised over its neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[0][-1], self.width), initializer="glorot_uniform", name="kernel")
        self.score = self.add_weight(shape=(self.width * 2, 1), initializer="glorot_uniform", name="score")
        self.built = True

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        states = ops.matmul(nodes, self.kernel)
        pairs = ops.reshape(ops.take(states, edges, axis=0), (ops.shape(edges)[0], -1))
        scores = ops.exp(ops.clip(ops.squeeze(ops.leaky_relu(ops.matmul(pairs, self.score)), -1), -2, 2))
        total = ops.segment_sum(scores, edges[:, 0], num_segments=500)
        scores = scores / ops.take(total, edges[:, 0], axis=0)
        neighbours = ops.take(states, edges[:, 1], axis=0)
        return ops.segment_sum(neighbours * scores[:, None], edges[:, 0], num_segments=500)


class AttentionNetwork(keras.Model):
    """Attention on a graph; a training step of its own, on a list of nodes and their classes."""

    def __init__(self) -> None:
        super().__init__()
        self.states = tf.random.normal((500, 64), seed=1)
        self.edges = tf.random.uniform((2000, 2), 0, 500, dtype=tf.int32, seed=1)
        self.before = layers.Dense(64, activation="relu")
        self.heads = [GraphAttention(16) for _ in range(4)]
        self.after = layers.Dense(7)

    def call(self, inputs: Any) -> Any:
        x = self.before(inputs[0])
        x = ops.nn.relu(ops.concatenate([head([x, inputs[1]]) for head in self.heads], axis=-1))
        return self.after(x)

    def train_step(self, data: Any) -> Any:
        nodes, labels = data
        with tf.GradientTape() as tape:
            outputs = self([self.states, self.edges])
            loss = self.compute_loss(y=labels, y_pred=tf.gather(outputs, nodes))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.compute_metrics(None, labels, tf.gather(outputs, nodes), None)


def graph_attention() -> Any:
    return compiled(AttentionNetwork(), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    keras.optimizers.SGD(0.1, momentum=0.9))  # fmt: skip


def molecules() -> Any:
    """Messages along bonds, then a transformer over the padded atoms of each molecule."""
    atoms, bonds, adjacency = keras.Input((20, 29)), keras.Input((20, 20, 7)), keras.Input((20, 20))
    x = layers.Dense(32)(atoms)
    for _ in range(2):
        kernel = layers.Reshape((20, 20, 32, 32))(layers.Dense(32 * 32)(bonds))
        messages = ops.einsum("bij,bijkl,bjl->bik", adjacency, kernel, x)
        x = layers.Dense(32, activation="relu")(layers.Concatenate()([x, messages]))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
    x = layers.Dense(64, activation="relu")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model([atoms, bonds, adjacency], layers.Dense(1, activation="sigmoid")(x))
    return compiled(model, keras.losses.BinaryCrossentropy(), metrics=[keras.metrics.AUC()])


def traffic() -> Any:
    """Graph convolution at each moment, then an LSTM over time, for every road at once."""
    speeds, adjacency = keras.Input((12, 26, 1)), tf.random.uniform((26, 26), seed=1)
    x = layers.Dense(10)(ops.einsum("ij,btjf->btif", adjacency, speeds))
    x = layers.Reshape((26, 12 * 10))(layers.Permute((2, 1, 3))(x))
    x = layers.TimeDistributed(layers.Reshape((12, 10)))(x)
    x = layers.TimeDistributed(layers.LSTM(64, activation="relu"))(x)
    return compiled(keras.Model(speeds, layers.Permute((2, 1))(layers.Dense(9)(x))), "mse", "rmsprop")
