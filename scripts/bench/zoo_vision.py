"""Keras's published examples on images, video and points, rebuilt at small size and compiled."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers, ops = keras.layers, keras.ops


def compiled(model: Any, loss: Any = "sparse_categorical_crossentropy", optimizer: Any = "adam", **more: Any) -> Any:
    model.compile(optimizer=optimizer, loss=loss, **more)
    return model


class Patches(layers.Layer):
    """The patches of an image, flat."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def call(self, images: Any) -> Any:
        shape = ops.shape(images)
        patches = ops.image.extract_patches(images, size=self.size)
        count = (shape[1] // self.size) * (shape[2] // self.size)
        return ops.reshape(patches, (shape[0], count, self.size * self.size * shape[3]))


class PatchEncoder(layers.Layer):
    """A projection of each patch and a learnt vector for its position."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count = count
        self.projection, self.position = layers.Dense(width), layers.Embedding(count, width)

    def call(self, patches: Any) -> Any:
        positions = ops.expand_dims(ops.arange(0, self.count, 1), axis=0)
        return self.projection(patches) + self.position(positions)


class StochasticDepth(layers.Layer):
    """Drops whole samples of a branch."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        kept = ops.floor(1 - self.rate + keras.random.uniform(shape, 0, 1, seed=self.seed_generator))
        return x / (1 - self.rate) * kept


def encoder_block(x: Any, heads: int, width: int, drop: float = 0.0) -> Any:
    y = layers.LayerNormalization(epsilon=1e-6)(x)
    y = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(y, y)
    x = layers.Add()([StochasticDepth(drop)(y) if drop else y, x])
    y = layers.Dense(width * 2, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
    return layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(y))])


def image_from_scratch() -> Any:
    image = keras.Input((64, 64, 3))
    x = layers.RandomRotation(0.1)(layers.RandomFlip("horizontal")(image))
    x = layers.Rescaling(1.0 / 255)(x)
    x = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(64, 3, strides=2, padding="same")(x)))
    before = x
    for width in (96, 128):
        for _ in range(2):
            x = layers.BatchNormalization()(layers.SeparableConv2D(width, 3, padding="same")(layers.ReLU()(x)))
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        before = x = layers.add([x, layers.Conv2D(width, 1, strides=2, padding="same")(before)])
    x = layers.Dropout(0.25)(layers.GlobalAveragePooling2D()(x))
    return compiled(keras.Model(image, layers.Dense(1)(x)), keras.losses.BinaryCrossentropy(from_logits=True))


def patch_transformer() -> Any:
    image = keras.Input((48, 48, 3))
    x = PatchEncoder(64, 64)(Patches(6)(layers.Normalization(mean=0.5, variance=0.1)(image)))
    for _ in range(3):
        x = encoder_block(x, 4, 64)
    x = layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization()(x)))
    return compiled(keras.Model(image, layers.Dense(10)(layers.Dense(128, activation="gelu")(x))),
                    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    keras.optimizers.AdamW(1e-3, weight_decay=1e-4),
                    metrics=[keras.metrics.SparseTopKCategoricalAccuracy(5)])  # fmt: skip


def compact_transformer() -> Any:
    image = keras.Input((32, 32, 3))
    x = image
    for width in (64, 128):
        x = layers.MaxPooling2D(3, 2, "same")(layers.Conv2D(width, 3, padding="same", activation="relu")(x))
    x = layers.Reshape((64, 128))(x)
    for drop in (0.0, 0.1):
        x = encoder_block(x, 2, 128, drop)
    weights = layers.Softmax(axis=1)(layers.Dense(1)(layers.LayerNormalization(epsilon=1e-5)(x)))
    pooled = ops.squeeze(ops.matmul(ops.transpose(weights, (0, 2, 1)), x), 1)
    return compiled(
        keras.Model(image, layers.Dense(10)(pooled)), keras.losses.CategoricalCrossentropy(from_logits=True)
    )


def convmixer() -> Any:
    image = keras.Input((32, 32, 3))
    x = layers.BatchNormalization()(
        layers.Activation("gelu")(layers.Conv2D(128, 2, 2)(layers.Rescaling(1 / 255)(image)))
    )
    for _ in range(4):
        y = layers.BatchNormalization()(layers.Activation("gelu")(layers.DepthwiseConv2D(5, padding="same")(x)))
        x = layers.BatchNormalization()(layers.Activation("gelu")(layers.Conv2D(128, 1)(layers.Add()([y, x]))))
    return compiled(keras.Model(image, layers.Dense(10, activation="softmax")(layers.GlobalAvgPool2D()(x))))


class WindowAttention(layers.Layer):
    """Attention inside windows, with a bias by relative position: its index is a variable that is not trained."""

    def __init__(self, width: int, window: int, heads: int, plain: bool) -> None:
        super().__init__()
        self.width, self.window, self.heads, self.plain = width, window, heads, plain
        self.qkv, self.projection = layers.Dense(3 * width), layers.Dense(width)

    def build(self, shape: Any) -> None:
        side = self.window
        self.table = self.add_weight(shape=((2 * side - 1) ** 2, self.heads), initializer="zeros", name="table")
        where = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij")).reshape(2, -1)
        apart = (where[:, :, None] - where[:, None, :]).transpose(1, 2, 0) + side - 1
        index = (apart[:, :, 0] * (2 * side - 1) + apart[:, :, 1]).astype("int32")
        if self.plain:
            self.index = tf.Variable(initial_value=lambda: tf.convert_to_tensor(index), trainable=False)
        else:
            self.index = keras.Variable(initializer=index, shape=index.shape, dtype="int32", trainable=False)
        super().build(shape)

    def call(self, x: Any) -> Any:
        count, each = self.window**2, self.width // self.heads
        qkv = ops.transpose(ops.reshape(self.qkv(x), (-1, count, 3, self.heads, each)), (2, 0, 3, 1, 4))
        scores = (qkv[0] * each**-0.5) @ ops.transpose(qkv[1], (0, 1, 3, 2))
        flat = ops.reshape(ops.convert_to_tensor(self.index), (-1,))
        bias = ops.reshape(ops.take(self.table, flat, axis=0), (count, count, -1))
        scores = keras.activations.softmax(scores + ops.expand_dims(ops.transpose(bias, (2, 0, 1)), 0), axis=-1)
        x = ops.reshape(ops.transpose(scores @ qkv[2], (0, 2, 1, 3)), (-1, count, self.width))
        return self.projection(x)


class SwinBlock(layers.Layer):
    """Shift, windows, attention, and back."""

    def __init__(self, width: int, side: int, window: int, shift: int, plain: bool) -> None:
        super().__init__()
        self.width, self.side, self.window, self.shift = width, side, window, shift
        self.norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self.attention, self.drop = WindowAttention(width, window, 4, plain), StochasticDepth(0.1)
        self.mlp = keras.Sequential([layers.Dense(width * 4, activation="gelu"), layers.Dense(width)])

    def call(self, x: Any) -> Any:
        side, window, width = self.side, self.window, self.width
        count = side // window
        y = ops.reshape(self.norms[0](x), (-1, side, side, width))
        y = ops.roll(y, shift=[-self.shift, -self.shift], axis=[1, 2])
        y = ops.transpose(ops.reshape(y, (-1, count, window, count, window, width)), (0, 1, 3, 2, 4, 5))
        y = self.attention(ops.reshape(y, (-1, window * window, width)))
        y = ops.transpose(ops.reshape(y, (-1, count, count, window, window, width)), (0, 1, 3, 2, 4, 5))
        y = ops.roll(ops.reshape(y, (-1, side, side, width)), shift=[self.shift, self.shift], axis=[1, 2])
        x = x + self.drop(ops.reshape(y, (-1, side * side, width)))
        return x + self.drop(self.mlp(self.norms[1](x)))


def swin(plain: bool = False) -> Any:
    image = keras.Input((32, 32, 3))
    x = PatchEncoder(256, 64)(Patches(2)(image))
    for shift in (0, 1):
        x = SwinBlock(64, 16, 2, shift, plain)(x)
    output = layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(image, output), keras.losses.CategoricalCrossentropy(label_smoothing=0.1))


def swin_plain_variables() -> Any:
    return swin(plain=True)


def mobilevit() -> Any:
    image = keras.Input((64, 64, 3))
    x = layers.Conv2D(16, 3, strides=2, padding="same", activation="swish")(image)
    for width in (32, 48):
        y = layers.BatchNormalization()(layers.Conv2D(width * 2, 1, activation="swish")(x))
        y = layers.DepthwiseConv2D(3, strides=2, padding="same", activation="swish")(y)
        x = layers.BatchNormalization()(layers.Conv2D(width, 1)(y))
    y = layers.Conv2D(64, 1, activation="swish")(layers.Conv2D(48, 3, padding="same", activation="swish")(x))
    y = layers.Reshape((4, 16, 64))(y)
    for _ in range(2):
        y = encoder_block(y, 2, 64)
    y = layers.Conv2D(48, 1, padding="same", activation="swish")(layers.Reshape((8, 8, 64))(y))
    x = layers.Conv2D(64, 3, padding="same", activation="swish")(layers.Concatenate()([x, y]))
    return compiled(keras.Model(image, layers.Dense(5, activation="softmax")(layers.GlobalAvgPool2D()(x))))


class Involution(layers.Layer):
    """A kernel for each position, made from the position itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.make = keras.Sequential(
            [layers.Conv2D(8, 1), layers.BatchNormalization(), layers.ReLU(), layers.Conv2D(9, 1)]
        )

    def call(self, x: Any) -> Any:
        _, height, width, _ = x.shape
        kernel = ops.expand_dims(ops.reshape(self.make(x), (-1, height, width, 9, 1)), axis=-1)
        unfolded = tf.image.extract_patches(x, [1, 3, 3, 1], [1, 1, 1, 1], [1, 1, 1, 1], "SAME")
        unfolded = ops.reshape(unfolded, (-1, height, width, 9, self.channels, 1))
        return ops.reshape(ops.sum(kernel * unfolded, axis=3), (-1, height, width, self.channels))


def involution() -> Any:
    image = keras.Input((32, 32, 3))
    x = layers.MaxPooling2D()(layers.ReLU()(Involution(3)(image)))
    x = layers.Flatten()(layers.ReLU()(Involution(3)(x)))
    return compiled(keras.Model(image, layers.Dense(10)(layers.Dense(64, activation="relu")(x))),
                    keras.losses.SparseCategoricalCrossentropy(from_logits=True))  # fmt: skip


class Perceiver(keras.Model):
    """A small learnt array that attends to all patches, then to itself; shared over several turns."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.encode = Patches(4), PatchEncoder(64, 64)
        self.cross, self.own = layers.MultiHeadAttention(1, 64), layers.MultiHeadAttention(4, 16)
        self.norms = [layers.LayerNormalization() for _ in range(3)]
        self.pool, self.head = layers.GlobalAveragePooling1D(), layers.Dense(10)

    def build(self, shape: Any) -> None:
        self.latent = self.add_weight(shape=(32, 64), initializer="random_normal", name="latent")
        super().build(shape)

    def call(self, images: Any) -> Any:
        data = self.norms[0](self.encode(self.patch(images)))
        latent = ops.broadcast_to(ops.expand_dims(self.latent, 0), (ops.shape(images)[0], 32, 64))
        for _ in range(2):
            latent = latent + self.cross(self.norms[1](latent), data)
            latent = latent + self.own(self.norms[2](latent), latent)
        return self.head(self.pool(latent))


def perceiver() -> Any:
    return compiled(Perceiver(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def external_attention() -> Any:
    image = keras.Input((32, 32, 3))
    x = PatchEncoder(64, 64)(Patches(4)(image))
    for _ in range(2):
        y = layers.Reshape((64, 4, 16))(layers.Dense(64)(layers.LayerNormalization(epsilon=1e-5)(x)))
        y = layers.Softmax(axis=1)(layers.Dense(16)(layers.Permute((2, 1, 3))(y)))
        y = layers.Reshape((64, 64))(layers.Permute((2, 1, 3))(layers.Dense(16)(y)))
        x = layers.Add()([layers.Dense(64)(y), x])
    return compiled(keras.Model(image, layers.Dense(10, activation="softmax")(layers.GlobalAvgPool1D()(x))),
                    keras.losses.CategoricalCrossentropy(label_smoothing=0.1))  # fmt: skip


def multiple_instances() -> Any:
    bags = [keras.Input((28, 28)) for _ in range(3)]
    embed, squeeze = layers.Dense(128, activation="relu"), layers.Dense(64, activation="relu")
    values = [squeeze(embed(layers.Flatten()(each))) for each in bags]
    v, u, w = (layers.Dense(32, activation="tanh"), layers.Dense(32, activation="sigmoid"), layers.Dense(1))
    scores = layers.Softmax()(layers.Concatenate()([w(layers.Multiply()([v(each), u(each)])) for each in values]))
    scaled = [layers.Multiply()([scores[:, place : place + 1], each]) for place, each in enumerate(values)]
    return compiled(keras.Model(bags, layers.Dense(2, activation="softmax")(layers.Concatenate()(scaled))))


def pets_unet() -> Any:
    image = keras.Input((64, 64, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, 3, strides=2, padding="same")(image)))
    before = x
    for width in (64, 128):
        for _ in range(2):
            x = layers.BatchNormalization()(layers.SeparableConv2D(width, 3, padding="same")(layers.ReLU()(x)))
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        before = x = layers.add([x, layers.Conv2D(width, 1, strides=2, padding="same")(before)])
    for width in (128, 64, 32):
        for _ in range(2):
            x = layers.BatchNormalization()(layers.Conv2DTranspose(width, 3, padding="same")(layers.ReLU()(x)))
        before = x = layers.add([layers.UpSampling2D(2)(x), layers.Conv2D(width, 1)(layers.UpSampling2D(2)(before))])
    return compiled(keras.Model(image, layers.Conv2D(3, 3, activation="softmax", padding="same")(x)))


def deeplab() -> Any:
    def block(x: Any, width: int = 64, kernel: int = 3, rate: int = 1) -> Any:
        x = layers.Conv2D(width, kernel, dilation_rate=rate, padding="same", use_bias=False)(x)
        return ops.nn.relu(layers.BatchNormalization()(x))

    image = keras.Input((96, 96, 3))
    backbone = keras.applications.MobileNetV2(weights=None, include_top=False, input_tensor=image, alpha=0.35)
    x = backbone.get_layer("block_13_expand_relu").output
    pooled = block(layers.AveragePooling2D((x.shape[1], x.shape[2]))(x), kernel=1)
    pooled = layers.UpSampling2D((x.shape[1], x.shape[2]), interpolation="bilinear")(pooled)
    x = block(layers.Concatenate()([pooled, *(block(x, rate=rate) for rate in (1, 2, 4))]), kernel=1)
    skip = block(backbone.get_layer("block_3_expand_relu").output, 32, 1)
    x = layers.Concatenate()([layers.UpSampling2D(4, interpolation="bilinear")(x), skip])
    x = layers.UpSampling2D(4, interpolation="bilinear")(block(block(x)))
    return compiled(keras.Model(image, layers.Conv2D(20, 1)(x)),
                    keras.losses.SparseCategoricalCrossentropy(from_logits=True))  # fmt: skip


def fully_convolutional() -> Any:
    image = keras.Input((64, 64, 3))
    x, kept = image, []
    for width in (32, 64, 128, 128):
        x = layers.MaxPooling2D()(layers.Conv2D(width, 3, padding="same", activation="relu")(x))
        kept.append(layers.Conv2D(4, 1)(x))
    x = layers.UpSampling2D(2, interpolation="bilinear")(layers.Conv2D(4, 1)(layers.Dropout(0.5)(x)))
    x = layers.UpSampling2D(2, interpolation="bilinear")(layers.Add()([x, kept[2]]))
    x = layers.UpSampling2D(4, interpolation="bilinear")(layers.Add()([x, kept[1]]))
    return compiled(
        keras.Model(image, layers.Activation("softmax")(x)), metrics=[keras.metrics.MeanIoU(4, sparse_y_pred=False)]
    )


def deep_supervision() -> Any:
    """As BASNet: a coarse map at every depth and a refined one, each with a loss."""
    image = keras.Input((64, 64, 3))
    x, skips, maps = image, [], []
    for width in (16, 32, 64):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x)))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    for factor, width in ((4, 64), (2, 32), (1, 16)):
        x = layers.Concatenate()([layers.UpSampling2D(2, interpolation="bilinear")(x), skips.pop()])
        x = layers.ReLU()(layers.Conv2D(width, 3, padding="same")(x))
        coarse = layers.Conv2D(1, 3, padding="same")(x)
        maps.append(layers.Activation("sigmoid")(layers.UpSampling2D(factor, interpolation="bilinear")(coarse)))
    refined = layers.Activation("sigmoid")(layers.Add()([maps[-1], layers.Conv2D(1, 3, padding="same")(maps[-1])]))
    return compiled(keras.Model(image, [refined, *maps]), "binary_crossentropy")


def super_resolution() -> Any:
    image = keras.Input((None, None, 1))
    x = layers.Conv2D(64, 5, activation="relu", padding="same", kernel_initializer="orthogonal")(image)
    x = layers.Conv2D(32, 3, activation="relu", padding="same")(
        layers.Conv2D(64, 3, activation="relu", padding="same")(x)
    )
    x = layers.Conv2D(9, 3, activation="relu", padding="same")(x)

    class DepthToSpace(layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.nn.depth_to_space(x, 3)

    return compiled(keras.Model(image, DepthToSpace()(x)), "mean_squared_error")


def denoising_autoencoder() -> Any:
    image = keras.Input((28, 28, 1))
    x = layers.MaxPooling2D(2, padding="same")(layers.Conv2D(32, 3, activation="relu", padding="same")(image))
    x = layers.MaxPooling2D(2, padding="same")(layers.Conv2D(32, 3, activation="relu", padding="same")(x))
    for _ in range(2):
        x = layers.Conv2DTranspose(32, 3, strides=2, activation="relu", padding="same")(x)
    return compiled(
        keras.Model(image, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)), "binary_crossentropy"
    )


class CTC(layers.Layer):
    """Adds the CTC loss of its inputs to the model."""

    def call(self, labels: Any, predicted: Any) -> Any:
        batch, length, width = ops.shape(labels)[0], ops.shape(predicted)[1], ops.shape(labels)[1]
        one = ops.ones((batch,), dtype="int32")
        self.add_loss(ops.mean(ops.ctc_loss(labels, predicted, width * one, length * one)))
        return predicted


def captcha_ocr() -> Any:
    image, labels = keras.Input((100, 32, 1), name="image"), keras.Input((5,), name="label", dtype="int32")
    x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu", padding="same")(image))
    x = layers.MaxPooling2D()(layers.Conv2D(64, 3, activation="relu", padding="same")(x))
    x = layers.Dropout(0.2)(layers.Dense(64, activation="relu")(layers.Reshape((25, 8 * 64))(x)))
    for width in (64, 32):
        x = layers.Bidirectional(layers.LSTM(width, return_sequences=True, dropout=0.25))(x)
    output = CTC(name="ctc_loss")(labels, layers.Dense(21, activation="softmax")(x))
    model = keras.Model([image, labels], output)
    model.compile(optimizer=keras.optimizers.Adam())
    return model


class Detection(keras.losses.Loss):
    """Focal loss for the classes and a smooth one for the boxes."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        boxes = keras.losses.huber(y_true[..., :4], y_pred[..., :4])
        classes = ops.one_hot(ops.cast(y_true[..., 4], "int32"), 10)
        focal = keras.losses.binary_focal_crossentropy(classes, y_pred[..., 4:], from_logits=True)
        positive = ops.cast(y_true[..., 4] > -1.0, "float32")
        return ops.sum(boxes * positive + focal, axis=-1) / (ops.sum(positive, axis=-1) + 1.0)


class FeaturePyramid(layers.Layer):
    """Maps at three scales, the coarser ones added to the finer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sides = [layers.Conv2D(width, 1) for _ in range(3)]
        self.after = [layers.Conv2D(width, 3, padding="same") for _ in range(3)]
        self.grow = layers.UpSampling2D(2)

    def call(self, maps: Any) -> Any:
        c3, c4, c5 = (side(each) for side, each in zip(self.sides, maps, strict=True))
        c4 = c4 + self.grow(c5)
        return [after(each) for after, each in zip(self.after, (c3 + self.grow(c4), c4, c5), strict=True)]


def retinanet() -> Any:
    image = keras.Input((96, 96, 3))
    x, maps = image, []
    for width in (32, 48, 64, 96):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, strides=2, padding="same")(x)))
        maps.append(x)

    def head(size: int) -> Any:
        towers = [layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(2)]
        return keras.Sequential([keras.Input((None, None, 64)), *towers, layers.Conv2D(9 * size, 3, padding="same")])

    pyramid = FeaturePyramid(64)(maps[1:])
    parts = []
    for size in (4, 10):
        shared = head(size)
        parts.append(layers.Concatenate(axis=1)([layers.Reshape((-1, size))(shared(each)) for each in pyramid]))
    return compiled(
        keras.Model(image, layers.Concatenate()(parts)), Detection(), keras.optimizers.SGD(1e-3, momentum=0.9)
    )


def box_transformer() -> Any:
    image = keras.Input((64, 64, 3))
    x = PatchEncoder(64, 64)(Patches(8)(image))
    for _ in range(2):
        x = encoder_block(x, 4, 64)
    x = layers.Dropout(0.3)(layers.Flatten()(layers.LayerNormalization()(x)))
    return compiled(
        keras.Model(image, layers.Dense(4)(layers.Dense(256, activation="gelu")(x))), keras.losses.MeanSquaredError()
    )


def keypoints() -> Any:
    backbone = keras.applications.MobileNetV2(weights=None, include_top=False, input_shape=(96, 96, 3))
    backbone.trainable = False
    image = keras.Input((96, 96, 3))
    x = layers.Dropout(0.3)(backbone(keras.applications.mobilenet_v2.preprocess_input(image)))
    x = layers.SeparableConv2D(48, 3, strides=1, activation="relu")(x)
    return compiled(keras.Model(image, layers.Reshape((1, 1, 48))(layers.GlobalAveragePooling2D()(x))), "mse")


class Orthogonal(keras.regularizers.Regularizer):
    """Keeps a predicted transformation near a rotation."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: Any) -> Any:
        x = ops.reshape(x, (-1, self.size, self.size))
        return ops.sum(0.001 * ops.square(ops.tensordot(x, x, axes=(2, 2)) - ops.eye(self.size)[None, :, None, :]))


def _t_net(inputs: Any, size: int) -> Any:
    x = inputs
    for width in (32, 64):
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.0)(layers.Conv1D(width, 1)(x)))
    x = layers.Dense(64, activation="relu")(layers.GlobalMaxPooling1D()(x))
    x = layers.Dense(size * size, kernel_initializer="zeros", activity_regularizer=Orthogonal(size))(x)
    return layers.Dot(axes=(2, 1))([inputs, layers.Reshape((size, size))(x)])


def pointnet() -> Any:
    points = keras.Input((256, 3))
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.0)(layers.Conv1D(32, 1)(_t_net(points, 3))))
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.0)(layers.Conv1D(128, 1)(_t_net(x, 32))))
    x = layers.Dropout(0.3)(layers.Dense(64, activation="relu")(layers.GlobalMaxPooling1D()(x)))
    return compiled(keras.Model(points, layers.Dense(10, activation="softmax")(x)))


def point_segmentation() -> Any:
    points = keras.Input((256, 3))
    low = layers.Conv1D(64, 1, activation="relu")(_t_net(points, 3))
    high = layers.Conv1D(256, 1, activation="relu")(_t_net(low, 64))
    pooled = layers.RepeatVector(256)(layers.GlobalMaxPooling1D()(high))
    x = layers.Conv1D(128, 1, activation="relu")(layers.Concatenate()([low, high, pooled]))
    return compiled(
        keras.Model(points, layers.Conv1D(5, 1, activation="softmax")(x)), keras.losses.CategoricalCrossentropy()
    )


def tubelet_transformer() -> Any:
    video = keras.Input((16, 28, 28, 1))
    x = layers.Reshape((-1, 64))(layers.Conv3D(64, (4, 7, 7), strides=(4, 7, 7))(video))
    x = x + layers.Embedding(64, 64)(ops.expand_dims(ops.arange(64), 0))
    for _ in range(2):
        x = encoder_block(x, 4, 64)
    return compiled(keras.Model(video, layers.Dense(11, activation="softmax")(layers.GlobalAvgPool1D()(x))))


def video_features() -> Any:
    frames, mask = keras.Input((20, 256)), keras.Input((20,), dtype="bool")
    x = layers.GRU(8)(layers.GRU(16, return_sequences=True)(frames, mask=mask))
    x = layers.Dense(8, activation="relu")(layers.Dropout(0.4)(x))
    return compiled(keras.Model([frames, mask], layers.Dense(5, activation="softmax")(x)))


def next_frame() -> Any:
    frames = keras.Input((6, 24, 24, 1))
    x = layers.ConvLSTM2D(16, 5, padding="same", return_sequences=True, activation="relu")(frames)
    x = layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True, activation="relu")(
        layers.BatchNormalization()(x)
    )
    return compiled(
        keras.Model(frames, layers.Conv3D(1, 3, activation="sigmoid", padding="same")(x)), "binary_crossentropy"
    )
