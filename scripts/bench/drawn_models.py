"""Models drawn by a seed: layers, sizes, optimizer, loss and batch, so that estimates meet what nobody has looked at.

`drawn(seed)` is the factory of a compiled model that runs in graph mode; `batch_size_of(seed)` its batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Draw = np.random.Generator
KINDS = ("image", "image", "image", "maps", "sequence", "tokens", "vector", "volume")
ACTIVATIONS = ("relu", "gelu", "tanh", "silu", "elu", "leaky_relu", "sigmoid", "softplus", "hard_silu", "mish")
OPTIMIZERS = (
    "SGD", "SGD momentum", "SGD nesterov", "Adam", "Adam", "Adam clipnorm", "Adam amsgrad", "Adam ema",
    "Adam global_clipnorm", "Adam accumulated", "AdamW", "RMSprop", "RMSprop centered", "Nadam", "Adamax", "Adagrad",
    "Adadelta", "Ftrl", "Lion", "Lamb", "Adafactor",
)  # fmt: skip


def batch_size_of(seed: int) -> int:
    """Return the samples in a batch, fewer of what is large; now and then a single one."""
    kind, draw = _kind_of(seed)
    least, most = {"vector": (64, 8192), "tokens": (4, 512), "sequence": (4, 512)}.get(kind, (2, 96))
    return 1 if draw.random() < 0.1 else int(np.exp(draw.uniform(np.log(least), np.log(most + 1))))


def _kind_of(seed: int) -> tuple[str, Draw]:
    draw = np.random.default_rng((seed, 1))
    return str(draw.choice(KINDS)), draw


def drawn(seed: int) -> Any:
    """Return the model of a seed, compiled."""
    import keras

    kind, _ = _kind_of(seed)
    draw = np.random.default_rng((seed, 2))
    inputs, x = {
        "image": _image, "maps": _maps, "sequence": _sequence, "tokens": _tokens, "vector": _vector, "volume": _volume,
    }[kind](draw)  # fmt: skip
    model = keras.Model(inputs, _ends(draw, x, is_dense=kind == "maps"))
    loss = {name: _loss(draw) for name in model.output_names}
    model.compile(_optimizer(draw), loss, jit_compile=False)
    return model


def _loss(draw: Draw) -> str:
    return str(draw.choice(["mse", "mae", "huber", "binary_crossentropy", "log_cosh"]))


def _optimizer(draw: Draw) -> Any:
    from keras import optimizers

    name, _, extra = str(draw.choice(OPTIMIZERS)).partition(" ")
    options = {
        "": {}, "momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True},
        "clipnorm": {"clipnorm": 1.0}, "amsgrad": {"amsgrad": True}, "ema": {"use_ema": True},
        "global_clipnorm": {"global_clipnorm": 1.0}, "accumulated": {"gradient_accumulation_steps": 2},
        "centered": {"centered": True},
    }[extra]  # fmt: skip
    return getattr(optimizers, name)(learning_rate=1e-3, **options)


def _width(draw: Draw, least: int, most: int) -> int:
    """Return a width, now and then one that no register is as wide as."""
    width = int(np.exp(draw.uniform(np.log(least), np.log(most))))
    return width if draw.random() < 0.3 else max(least, width // 4 * 4)


def _activation(draw: Draw) -> str:
    return str(draw.choice(ACTIVATIONS)) if draw.random() < 0.5 else "relu"


def _norm(draw: Draw, x: Any) -> Any:
    from keras import layers

    channels = x.shape[-1]
    groups = next(each for each in (8, 4, 3, 2, 1) if channels % each == 0)
    return [
        layers.BatchNormalization, layers.BatchNormalization, layers.LayerNormalization,
        lambda: layers.GroupNormalization(groups), layers.UnitNormalization, lambda: layers.Activation("linear"),
    ][int(draw.integers(6))]()(x)  # fmt: skip


def _ends(draw: Draw, x: Any, is_dense: bool) -> list[Any]:
    """Return one output or two, of a value a sample or, `is_dense`, a place."""
    from keras import layers

    if not is_dense and len(x.shape) > 2:
        if draw.random() < 0.3:
            x = layers.Flatten()(x)
        else:
            x = getattr(layers, f"Global{draw.choice(['Average', 'Max'])}Pooling{len(x.shape) - 2}D")()(x)
    ends = []
    for number in range(1 + (draw.random() < 0.2)):
        y = x
        if draw.random() < 0.4:
            y = layers.Dense(_width(draw, 8, 256), _activation(draw))(y)
        if draw.random() < 0.3:
            y = layers.Dropout(0.3)(y)
        ends.append(layers.Dense(int(draw.integers(1, 200)), "sigmoid", name=f"end_{number}")(y))
    return ends


def _conv_block(draw: Draw, x: Any, filters: int) -> Any:
    """Return what one of the blocks that image networks are built of makes of `x`."""
    from keras import layers

    size = int(draw.choice([1, 3, 3, 3, 5]))
    bias = bool(draw.random() < 0.5)
    kind = str(
        draw.choice(["plain", "plain", "residual", "separable", "inverted", "branches", "dense", "dilated", "squeeze"])
    )
    if kind == "plain":
        return layers.Activation(_activation(draw))(
            _norm(draw, layers.Conv2D(filters, size, padding="same", use_bias=bias)(x))
        )
    if kind == "residual":
        y = layers.Conv2D(filters, size, padding="same", activation=_activation(draw))(x)
        y = _norm(draw, layers.Conv2D(filters, 3, padding="same", use_bias=bias)(y))
        return layers.ReLU()(layers.add([y, layers.Conv2D(filters, 1)(x)]))
    if kind == "separable":
        return layers.SeparableConv2D(filters, size, padding="same", activation=_activation(draw))(x)
    if kind == "inverted":
        y = layers.Activation("relu6")(_norm(draw, layers.Conv2D(2 * filters, 1, use_bias=False)(x)))
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=bias)(y)
        return layers.Conv2D(filters, 1)(_norm(draw, y))
    if kind == "branches":
        ways = [layers.Conv2D(max(filters // 3, 1), each, padding="same", activation="relu")(x) for each in (1, 3, 5)]
        return layers.Concatenate()([*ways, layers.MaxPooling2D(3, 1, padding="same")(x)])
    if kind == "dense":
        return layers.Concatenate()([x, layers.Conv2D(filters, 3, padding="same", activation=_activation(draw))(x)])
    if kind == "dilated":
        return layers.Conv2D(filters, 3, padding="same", dilation_rate=2, activation=_activation(draw))(x)
    y = layers.Conv2D(filters, size, padding="same", activation="relu")(x)
    weights = layers.Dense(max(filters // 4, 1), "relu")(layers.GlobalAveragePooling2D(keepdims=True)(y))
    return layers.Multiply()([y, layers.Dense(filters, "sigmoid")(weights)])


def _smaller(draw: Draw, x: Any, filters: int) -> Any:
    from keras import layers

    return [
        layers.MaxPooling2D(2, padding="same"), layers.AveragePooling2D(2, padding="same"),
        layers.Conv2D(filters, 3, strides=2, padding="same"), layers.Conv2D(filters, 2, strides=2),
    ][int(draw.integers(4))](x)  # fmt: skip


def _image(draw: Draw) -> tuple[Any, Any]:
    import keras

    side, filters = int(draw.integers(16, 65)), _width(draw, 4, 32)
    inputs = x = keras.Input((side, side + int(draw.integers(0, 3)), int(draw.choice([1, 3, 3, 4]))))
    for stage in range(int(draw.integers(1, 4))):
        for _ in range(int(draw.integers(1, 4))):
            x = _conv_block(draw, x, min(filters << stage, 96))
        x = _smaller(draw, x, filters << stage)
    return inputs, x


def _maps(draw: Draw) -> tuple[Any, Any]:
    """Return an encoder and decoder, with connections across or without."""
    import keras
    from keras import layers

    side, filters, depth = int(draw.integers(2, 9)) * 8, _width(draw, 4, 24), int(draw.integers(1, 4))
    inputs = x = keras.Input((side, side, 3))
    across, is_unet = [], draw.random() < 0.6
    for stage in range(depth):
        x = _conv_block(draw, x, filters << stage)
        across.append(x)
        x = (
            layers.MaxPooling2D()(x)
            if draw.random() < 0.5
            else layers.Conv2D(filters << stage, 3, strides=2, padding="same")(x)
        )
    for stage in reversed(range(depth)):
        x = _conv_block(draw, x, filters << stage)
        way = int(draw.integers(3))
        if way == 0:
            x = layers.Conv2DTranspose(filters << stage, 3, strides=2, padding="same", activation="relu")(x)
        else:
            x = layers.UpSampling2D(interpolation=("nearest", "bilinear")[way - 1])(x)
        if is_unet:
            x = layers.Concatenate()([x, across[stage]])
    return inputs, _conv_block(draw, x, filters)


def _over_time(draw: Draw, x: Any) -> Any:
    """Return what layers for sequences make of `x`, a sequence still."""
    import keras
    from keras import layers

    width = _width(draw, 8, 96)
    for _ in range(int(draw.integers(1, 5))):
        kind = str(draw.choice(["conv", "causal", "lstm", "gru", "both", "rnn", "attention", "mlp", "pool", "gated"]))
        if kind == "conv":
            x = _norm(
                draw, layers.Conv1D(width, int(draw.choice([1, 3, 5])), padding="same", activation=_activation(draw))(x)
            )
        elif kind == "causal":
            x = layers.Conv1D(width, 2, padding="causal", dilation_rate=2, activation=_activation(draw))(x)
        elif kind == "lstm":
            x = layers.LSTM(width, return_sequences=True)(x)
        elif kind == "gru":
            x = layers.GRU(width, return_sequences=True, reset_after=bool(draw.random() < 0.8))(x)
        elif kind == "both":
            x = layers.Bidirectional(layers.LSTM(max(width // 2, 4), return_sequences=True))(x)
        elif kind == "rnn":
            x = layers.SimpleRNN(width, return_sequences=True)(x)
        elif kind == "attention":
            x = layers.Dense(width)(x) if x.shape[-1] != width else x
            y = layers.LayerNormalization()(x)
            x = layers.add(
                [x, layers.MultiHeadAttention(int(draw.choice([1, 2, 4])), max(width // 4, 4), dropout=0.1)(y, y)]
            )
            y = layers.Dense(2 * width, "gelu")(layers.LayerNormalization()(x))
            x = layers.add([x, layers.Dense(width)(y)])
        elif kind == "mlp":
            x = layers.TimeDistributed(layers.Dense(width, _activation(draw)))(x)
        elif kind == "pool" and x.shape[1] > 8:
            x = layers.MaxPooling1D(2, padding="same")(x)
        elif kind == "gated":
            x = layers.Multiply()([layers.Dense(width, "tanh")(x), layers.Dense(width, "sigmoid")(x)])
        if draw.random() < 0.2:
            x = keras.layers.SpatialDropout1D(0.2)(x)
    return x


def _sequence(draw: Draw) -> tuple[Any, Any]:
    import keras

    inputs = keras.Input((int(draw.integers(8, 97)), _width(draw, 2, 64)))
    return inputs, _over_time(draw, inputs)


def _tokens(draw: Draw) -> tuple[Any, Any]:
    import keras
    from keras import layers

    inputs = keras.Input((int(draw.integers(8, 97)),), dtype="int32")
    table = layers.Embedding(_width(draw, 100, 20_000), _width(draw, 8, 96), mask_zero=bool(draw.random() < 0.2))
    return inputs, _over_time(draw, table(inputs))


def _vector(draw: Draw) -> tuple[Any, Any]:
    """Return layers for tables of values: one way in or two, wide or deep."""
    import keras
    from keras import layers

    inputs = [keras.Input((_width(draw, 4, 512),)) for _ in range(1 + (draw.random() < 0.3))]
    x = layers.Concatenate()(inputs) if len(inputs) > 1 else inputs[0]
    for _ in range(int(draw.integers(1, 8))):
        width = _width(draw, 16, 1024)
        y = layers.Dense(width, _activation(draw), use_bias=bool(draw.random() < 0.8))(x)
        if draw.random() < 0.3:
            y = _norm(draw, y)
        if draw.random() < 0.3:
            y = layers.Dropout(0.2)(y)
        if draw.random() < 0.2:
            y = layers.GaussianNoise(0.1)(y)
        x = layers.Concatenate()([x, y]) if draw.random() < 0.2 else y
    return inputs, x


def _volume(draw: Draw) -> tuple[Any, Any]:
    import keras
    from keras import layers

    side, filters = int(draw.integers(6, 17)), _width(draw, 4, 16)
    inputs = x = keras.Input((int(draw.integers(3, 9)), side, side, int(draw.choice([1, 3]))))
    for _ in range(int(draw.integers(1, 4))):
        kind = str(draw.choice(["conv", "conv", "frames", "loop", "pool"]))
        if kind == "conv":
            x = _norm(draw, layers.Conv3D(filters, 3, padding="same", activation=_activation(draw))(x))
        elif kind == "frames":
            x = layers.TimeDistributed(layers.Conv2D(filters, 3, padding="same", activation=_activation(draw)))(x)
        elif kind == "loop":
            x = layers.ConvLSTM2D(filters, 3, padding="same", return_sequences=True)(x)
        else:
            x = layers.AveragePooling3D(2, padding="same")(x)
    return inputs, x
