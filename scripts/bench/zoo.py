"""Networks that the benches train: small enough for a laptop, of every common family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

layers = keras.layers


@dataclass(frozen=True)
class Entry:
    """A network and how the benches train it.

    Attributes:
        build: Factory, called under the dtype policy that is set.
        batches: Batch sizes.
        losses: Loss of each output: "sparse" (class indices) or "mse".
        held_out: Whether it is reported apart because nothing may be tuned to it.
        heavy: Whether XLA takes minutes to compile it; it has one XLA row only.
        mixed: Mixed-precision policies that TensorFlow can train it in on a CPU.
        input_shape: Input shape without the batch, if the model does not declare it.
    """

    build: Callable[[], Any]
    batches: tuple[int, ...]
    losses: tuple[str, ...] = ("sparse",)
    held_out: bool = False
    heavy: bool = False
    mixed: tuple[str, ...] = ("mixed_bfloat16", "mixed_float16")
    input_shape: tuple[int, ...] | None = None


def mnist_cnn() -> Any:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
    )


def small_cnn() -> Any:
    """Build a network with a step of a few milliseconds, to time the work beside it."""
    parts = [layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(32, 3, activation="relu")]
    return keras.Sequential(
        [keras.Input((28, 28, 1)), *parts, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10)]
    )


def wide_mlp() -> Any:
    hidden = [layers.Dense(4096, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10)])


def application(name: str, size: int) -> Callable[[], Any]:
    """Return a factory of an untrained network of `keras.applications` for square images."""

    def build() -> Any:
        make = getattr(keras.applications, name)
        return make(weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None)

    return build


def recurrent(layer: str) -> Callable[[], Any]:
    """Return a factory of two recurrent layers of a class of `keras.layers`."""

    def build() -> Any:
        make = getattr(keras.layers, layer)
        return keras.Sequential([keras.Input((64, 32)), make(128, return_sequences=True), make(128), layers.Dense(10)])

    return build


def transformer() -> Any:
    inputs = keras.Input((64, 128))
    x = inputs
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y)])
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def unet() -> Any:
    inputs = keras.Input((64, 64, 3))
    x, skips = inputs, []
    for width in (16, 32, 64):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    for width in (64, 32, 16):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = layers.Concatenate()([x, skips.pop()])
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def text_classifier() -> Any:
    return keras.Sequential(
        [keras.Input((128,), dtype="int32"), layers.Embedding(20_000, 64), layers.Conv1D(64, 5, activation="relu"),
         layers.GlobalMaxPooling1D(), layers.Dense(64, activation="relu"), layers.Dense(10)]
    )  # fmt: skip


def deep_mlp() -> Any:
    return keras.Sequential(
        [keras.Input((256,)), *(layers.Dense(256, activation="relu") for _ in range(40)), layers.Dense(10)]
    )


def wavenet() -> Any:
    inputs = keras.Input((512, 16))
    x = inputs
    for rate in (1, 2, 4, 8, 16, 32):
        y = layers.Conv1D(32, 2, padding="causal", dilation_rate=rate, activation="tanh")(x)
        x = layers.Concatenate()([x, y])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalMaxPooling1D()(x)))


def conv3d() -> Any:
    return keras.Sequential(
        [keras.Input((16, 32, 32, 2)), layers.Conv3D(16, 3, activation="relu"), layers.MaxPooling3D(),
         layers.Conv3D(32, 3, activation="relu"), layers.GlobalAveragePooling3D(), layers.Dense(10)]
    )  # fmt: skip


def siamese() -> Any:
    image = keras.Input((48, 48, 1))
    x = image
    for width in (16, 32, 64):
        x = layers.MaxPooling2D()(layers.BatchNormalization()(layers.Conv2D(width, 3, activation="relu")(x)))
    tower = keras.Model(image, layers.Flatten()(x))
    a, b = keras.Input((48, 48, 1)), keras.Input((48, 48, 1))
    return keras.Model([a, b], layers.Dense(10)(layers.Concatenate()([tower(a), tower(b)])))


def autoencoder() -> Any:
    inputs = keras.Input((64, 64, 3))
    x = inputs
    for width in (32, 64, 128):
        x = layers.Conv2D(width, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Dense(256)(layers.Flatten()(x))
    x = layers.Reshape((8, 8, 128))(layers.Dense(8 * 8 * 128, activation="relu")(x))
    for width in (64, 32, 16):
        x = layers.Conv2DTranspose(width, 3, strides=2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(x))


class Sampling(layers.Layer):
    """Sample a normal distribution and add its divergence from the standard normal as a loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        ops = keras.ops
        divergence = -0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        self.add_loss(ops.cast(divergence, "float32"))
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def variational() -> Any:
    inputs = keras.Input((784,))
    x = layers.Dense(1024, activation="relu")(layers.Dense(1024, activation="relu")(inputs))
    x = Sampling()([layers.Dense(64)(x), layers.Dense(64)(x)])
    x = layers.Dense(1024, activation="relu")(layers.Dense(1024, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(784)(x))


def bidirectional() -> Any:
    return keras.Sequential(
        [keras.Input((64, 48)), layers.Bidirectional(layers.LSTM(96, return_sequences=True)),
         layers.Bidirectional(layers.GRU(64)), layers.Dense(10)]
    )  # fmt: skip


class Positions(layers.Layer):
    """A learnt vector for each position, added."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, x: Any) -> Any:
        return x + keras.ops.cast(self.table, x.dtype)


def decoder() -> Any:
    tokens = keras.Input((96,), dtype="int32")
    x = Positions()(layers.Embedding(4000, 192)(tokens))
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(6, 32, dropout=0.1)(y, y, use_causal_mask=True)])
        y = layers.Dense(768, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(192)(y))])
    return keras.Model(tokens, layers.Dense(4000)(layers.LayerNormalization()(x)))


def separable() -> Any:
    return keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            layers.SeparableConv2D(32, 3, activation="relu"),
            layers.SeparableConv2D(64, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.DepthwiseConv2D(5, depth_multiplier=2, activation="relu"),
            layers.SeparableConv2D(128, 3, strides=2, activation="swish"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def grouped() -> Any:
    inputs = keras.Input((48, 48, 3))
    x = layers.Conv2D(64, 3, padding="same")(inputs)
    for _ in range(2):  # Keras has XLA compile each grouped convolution on a CPU, in graph mode too
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(128, 1)(x)))
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(128, 3, padding="same", groups=8)(y)))
        x = layers.Add()([x, layers.Conv2D(64, 1)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def several_inputs_and_outputs() -> Any:
    image, table, words = keras.Input((48, 48, 3)), keras.Input((64,)), keras.Input((40,), dtype="int32")
    x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(image))
    x = layers.Flatten()(layers.MaxPooling2D()(layers.Conv2D(64, 3, activation="relu")(x)))
    y = layers.Dense(256, activation="relu")(table)
    z = layers.GlobalAveragePooling1D()(layers.Embedding(5000, 64)(words))
    joined = layers.Dense(512, activation="relu")(layers.Concatenate()([x, y, z]))
    return keras.Model(
        [image, table, words], [layers.Dense(10, name="kind")(joined), layers.Dense(4, name="box")(joined)]
    )


def frozen_backbone() -> Any:
    backbone = keras.applications.MobileNetV2(weights=None, include_top=False, input_shape=(96, 96, 3), pooling="avg")
    backbone.trainable = False
    inputs = keras.Input((96, 96, 3))
    x = layers.Dropout(0.2)(backbone(inputs, training=False))
    return keras.Model(inputs, layers.Dense(10)(layers.Dense(256, activation="relu")(x)))


def half_frozen() -> Any:
    model = application("ResNet50", 64)()
    for layer in model.layers[:100]:
        layer.trainable = False
    return model


def lora() -> Any:
    inputs = keras.Input((1024,))
    x = inputs
    for _ in range(6):
        x = layers.Dense(1024, activation="gelu")(x)
    model = keras.Model(inputs, layers.Dense(10)(x))
    for layer in model.layers[1:-1]:
        layer.enable_lora(8)
    return model


def very_wide() -> Any:
    return keras.Sequential(
        [keras.Input((2048,)), layers.Dense(8192, activation="relu"), layers.Dense(4096, activation="relu"),
         layers.Dense(10)]
    )  # fmt: skip


def very_deep() -> Any:
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(50):
        y = layers.Conv2D(16, 3, padding="same")(layers.ReLU()(layers.BatchNormalization()(x)))
        x = layers.Add()([x, y])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


class OwnTrainStep(keras.Model):
    """A functional model with a training step of its own: mixes the batch, clips the gradients by norm."""

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        x = 0.9 * x + 0.1 * tf.reverse(x, [0])
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), training=True)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_train_step() -> Any:
    inputs = keras.Input((64, 64, 3))
    x = inputs
    for width in (32, 64, 128):
        x = layers.MaxPooling2D()(layers.Conv2D(width, 3, padding="same", activation="relu")(x))
    return OwnTrainStep(inputs, layers.Dense(10)(layers.Dense(512, activation="relu")(layers.Flatten()(x))))


class Subclassed(keras.Model):
    """A model written as a class, with nothing declared of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = [layers.Conv2D(48, 3, padding="same", activation="relu") for _ in range(4)]
        self.norms = [layers.BatchNormalization() for _ in range(4)]
        self.pool = layers.GlobalAveragePooling2D()
        self.head = layers.Dense(10)

    def call(self, x: Any, training: bool = False) -> Any:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x), training=training)
        return self.head(self.pool(x))


def squeeze_excite() -> Any:
    inputs = keras.Input((64, 64, 3))
    x = layers.Conv2D(32, 3, strides=2, padding="same", activation="swish")(inputs)
    for width in (32, 64, 128):
        x = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", activation="swish")(x))
        scale = layers.Dense(width // 4, activation="relu")(layers.GlobalAveragePooling2D()(x))
        scale = layers.Reshape((1, 1, width))(layers.Dense(width, activation="sigmoid")(scale))
        x = layers.AveragePooling2D(2)(layers.Multiply()([x, scale]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def segmentation() -> Any:
    inputs = keras.Input((64, 64, 3))
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    skip = x
    x = layers.Conv2D(64, 3, strides=2, padding="same", activation="relu")(x)
    for rate in (1, 2, 4):
        x = layers.BatchNormalization()(layers.Conv2D(64, 3, padding="same", dilation_rate=rate, activation="relu")(x))
    x = layers.Concatenate()([layers.UpSampling2D(interpolation="bilinear")(x), skip])
    return keras.Model(inputs, layers.Conv2D(8, 1)(layers.Conv2D(32, 3, padding="same", activation="relu")(x)))


def groupnorm_net() -> Any:
    inputs = keras.Input((48, 48, 3))
    x = inputs
    for width in (32, 64, 128):
        x = layers.Conv2D(width, 3, padding="same")(x)
        x = layers.MaxPooling2D()(layers.Activation("silu")(layers.GroupNormalization(8)(x)))
        x = layers.LayerNormalization()(layers.SpatialDropout2D(0.1)(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def mixer() -> Any:
    inputs = keras.Input((64, 64, 3))
    x = layers.Reshape((64, 128))(layers.Conv2D(128, 8, strides=8)(inputs))
    for _ in range(6):
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        y = layers.Dense(64)(layers.Dense(256, activation="gelu")(y))
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def vision_transformer() -> Any:
    inputs = keras.Input((64, 64, 3))
    x = Positions()(layers.Reshape((64, 192))(layers.Conv2D(192, 8, strides=8)(inputs)))
    for _ in range(5):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(3, 64)(y, y)])
        y = layers.Dense(576, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(192)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def video() -> Any:
    return keras.Sequential(
        [keras.Input((8, 32, 32, 3)), layers.TimeDistributed(layers.Conv2D(32, 3, activation="relu")),
         layers.TimeDistributed(layers.MaxPooling2D()), layers.TimeDistributed(layers.Conv2D(48, 3, activation="relu")),
         layers.TimeDistributed(layers.GlobalAveragePooling2D()), layers.GRU(64), layers.Dense(10)]
    )  # fmt: skip


def recommender() -> Any:
    user, item = keras.Input((1,), dtype="int32"), keras.Input((20,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(50_000, 64)(user))
    y = layers.GlobalAveragePooling1D()(layers.Embedding(30_000, 64)(item))
    joined = layers.Concatenate()([x, y, layers.Multiply()([x, y])])
    for width in (512, 256):
        joined = layers.BatchNormalization()(layers.Dense(width, activation="relu")(joined))
    return keras.Model([user, item], layers.Dense(10)(joined))


ZOO: dict[str, Entry] = {
    "mnist_cnn": Entry(mnist_cnn, (64, 512)),
    "resnet50": Entry(application("ResNet50", 96), (4, 16), heavy=True),
    "transformer": Entry(transformer, (16, 64)),
    "vgg16": Entry(application("VGG16", 64), (8, 24)),
    "lstm": Entry(recurrent("LSTM"), (32, 128, 512)),
    "mobilenet_v2": Entry(application("MobileNetV2", 96), (8, 32), heavy=True),
    "wide_mlp": Entry(wide_mlp, (64, 1024)),
    "unet": Entry(unet, (8, 32)),
    "mixer": Entry(mixer, (16, 96), held_out=True),
    "decoder": Entry(decoder, (8, 24)),
    "efficientnet_b0": Entry(application("EfficientNetB0", 64), (8, 32), heavy=True),
    "conv3d": Entry(conv3d, (8, 48), mixed=("mixed_bfloat16",)),
    "text_classifier": Entry(text_classifier, (64, 512)),
    "resnet50_v2": Entry(application("ResNet50V2", 64), (8, 32), held_out=True, heavy=True),
    "siamese": Entry(siamese, (32, 192)),
    "very_wide": Entry(very_wide, (32, 512)),
    "vision_transformer": Entry(vision_transformer, (8, 48), held_out=True),
    "densenet121": Entry(application("DenseNet121", 64), (8, 24), heavy=True),
    "wavenet": Entry(wavenet, (16, 64)),
    "autoencoder": Entry(autoencoder, (16, 128), losses=("mse",)),
    "mobilenet_v3": Entry(application("MobileNetV3Small", 96), (16, 64), held_out=True, heavy=True),
    "gru": Entry(recurrent("GRU"), (32, 256)),
    "separable": Entry(separable, (16, 64)),
    "frozen_backbone": Entry(frozen_backbone, (16, 64), heavy=True),
    "several_inputs_and_outputs": Entry(several_inputs_and_outputs, (32, 256), losses=("sparse", "mse")),
    "segmentation": Entry(segmentation, (8, 32), held_out=True),
    "inception_v3": Entry(application("InceptionV3", 80), (8, 16), heavy=True),
    "deep_mlp": Entry(deep_mlp, (512, 4096)),
    "variational": Entry(variational, (64, 1024), losses=("mse",)),
    "bidirectional": Entry(bidirectional, (32, 128), held_out=True),
    "convnext_tiny": Entry(application("ConvNeXtTiny", 64), (4, 12), held_out=True, heavy=True),
    "lora": Entry(lora, (64, 1024)),
    "grouped": Entry(grouped, (8, 32)),
    "own_train_step": Entry(own_train_step, (16, 96)),
    "xception": Entry(application("Xception", 72), (4, 12), heavy=True),
    "recommender": Entry(recommender, (256, 4096), held_out=True),
    "very_deep": Entry(very_deep, (16, 64)),
    "squeeze_excite": Entry(squeeze_excite, (16, 128)),
    "vgg19": Entry(application("VGG19", 64), (4, 16), held_out=True),
    "subclassed": Entry(Subclassed, (8, 48), input_shape=(48, 48, 3)),
    "mobilenet": Entry(application("MobileNet", 96), (8, 32), heavy=True),
    "groupnorm_net": Entry(groupnorm_net, (16, 64), held_out=True),
    "half_frozen": Entry(half_frozen, (8, 32), heavy=True),
    "video": Entry(video, (8, 48), held_out=True),
    "efficientnet_v2b0": Entry(application("EfficientNetV2B0", 64), (8, 24), heavy=True),
    "nasnet_mobile": Entry(application("NASNetMobile", 64), (4, 12), held_out=True, heavy=True),
}

# name → (Keras class, settings beside the learning rate)
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
    "lion": ("Lion", {}),
    "adamw": ("AdamW", {}),
    "adam_ema": ("Adam", {"use_ema": True}),
    "adam_accumulate": ("Adam", {"gradient_accumulation_steps": 4}),
}


def loss(name: str) -> Any:
    losses = keras.losses
    return losses.SparseCategoricalCrossentropy(from_logits=True) if name == "sparse" else losses.MeanSquaredError()


def compiled(name: str, optimizer: str, dtype: str, metrics: bool, jit_compile: bool) -> Any:
    """Build a network of ZOO and compile it for a row: the factory that `estimate` opens."""
    entry = ZOO[name]
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        model = entry.build()
    finally:
        keras.config.set_dtype_policy(before)
    losses = [loss(kind) for kind in entry.losses]
    measures = [["accuracy"] if kind == "sparse" else ["mae"] for kind in entry.losses]
    one = len(losses) == 1
    kind, settings = OPTIMIZERS[optimizer]
    model.compile(
        optimizer=getattr(keras.optimizers, kind)(1e-4, **settings),
        loss=losses[0] if one else losses,
        metrics=(measures[0] if one else measures) if metrics else None,
        jit_compile=jit_compile,
    )
    return model


def batch_of(name: str, model: Any, batch: int) -> tuple[Any, Any]:
    """Return x and y as TensorFlow tensors, or lists if the model has several inputs or outputs."""
    import tensorflow as tf

    entry = ZOO[name]

    # Drawn by one operation of TensorFlow: a tensor made of a NumPy array may stay in NumPy's memory, outside the
    # allocator, and `tf.random` scales what it draws in buffers of the batch's size, which a limit would have to hold.
    def filled(shape: tuple[int, ...], dtype: str, most: int = 4000) -> Any:
        drawn = {"shape": shape, "key": tf.constant([1], tf.uint64), "counter": tf.zeros(2, tf.uint64), "alg": 1}
        if dtype.startswith("int"):  # spread over the vocabulary
            zero, end = tf.constant(0, dtype), tf.constant(most, dtype)
            return tf.raw_ops.StatelessRandomUniformIntV2(minval=zero, maxval=end, **drawn)
        return tf.raw_ops.StatelessRandomUniformV2(dtype=dtype, **drawn)

    def target(shape: tuple[int, ...], loss: str) -> Any:
        if loss == "sparse":
            return filled((batch, *shape[1:-1]), "int32", 4)
        return filled((batch, *shape[1:]), "float32")

    if entry.input_shape is not None:
        return filled((batch, *entry.input_shape), "float32"), target((batch, 10), entry.losses[0])
    x = [filled((batch, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
    y = [target(tensor.shape, loss) for tensor, loss in zip(model.outputs, entry.losses, strict=True)]
    return (x if len(x) > 1 else x[0]), (y if len(y) > 1 else y[0])
