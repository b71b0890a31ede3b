"""Training loops without `fit`, as in Keras's published examples: each function returns the step that the loop runs."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from zoo_steps import applied, image_critic, image_generator

layers, ops = keras.layers, keras.ops


def from_scratch() -> Any:
    """A classifier with a metric, as in the guide to loops from scratch."""
    inputs = keras.Input((784,))
    x = layers.Dense(64, activation="relu")(layers.Dense(64, activation="relu")(inputs))
    model, optimizer = keras.Model(inputs, layers.Dense(10)(x)), keras.optimizers.Adam(1e-3)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits) + sum(model.losses)
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        metric.update_state(y, logits)
        return loss

    return train_step


def compiled_by_xla() -> Any:
    """The same kind of step, on images, with `jit_compile=True`."""
    critic, optimizer = image_critic(32), keras.optimizers.SGD(1e-2, momentum=0.9)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(jit_compile=True)
    def train_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, critic(images, training=True))
        applied(tape, loss, optimizer, critic.trainable_weights)
        return loss

    return train_step


class AdversarialLoop:
    """A generator and a discriminator; the step is a method."""

    def __init__(self) -> None:
        self.discriminator, self.generator = image_critic(32), image_generator(32, 64)
        self.d_optimizer, self.g_optimizer = keras.optimizers.Adam(3e-4), keras.optimizers.Adam(4e-4)
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def train_step(self, real: Any) -> Any:
        batch = tf.shape(real)[0]
        both = tf.concat([self.generator(tf.random.normal((batch, 64))), real], 0)
        labels = tf.concat([tf.ones((batch, 1)), tf.zeros((batch, 1))], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_of(labels, self.discriminator(both))
        applied(tape, d_loss, self.d_optimizer, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            made = self.generator(tf.random.normal((batch, 64)))
            g_loss = self.loss_of(tf.zeros((batch, 1)), self.discriminator(made))
        applied(tape, g_loss, self.g_optimizer, self.generator.trainable_weights)
        return d_loss, g_loss, made


def adversarial() -> Any:
    loop = AdversarialLoop()
    return loop, loop.train_step


def neural_style() -> Any:
    """The weights are an image; what a frozen network makes of it is compared with two others."""
    vgg = keras.applications.VGG16(weights=None, include_top=False, input_shape=(96, 96, 3))
    features = keras.Model(vgg.inputs, [vgg.get_layer(f"block{place}_conv1").output for place in range(1, 5)])
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(100.0, 100, 0.96))
    image = keras.Variable(keras.initializers.RandomUniform(), shape=(1, 96, 96, 3), name="image")

    def gram(x: Any) -> Any:
        x = tf.reshape(tf.transpose(x, (2, 0, 1)), (tf.shape(x)[2], -1))
        return tf.matmul(x, x, transpose_b=True)

    @tf.function
    def step(base: Any, style: Any) -> Any:
        with tf.GradientTape() as tape:
            found = features(tf.concat([base, style, tf.convert_to_tensor(image)], 0))
            loss = 2.5e-8 * tf.reduce_sum(tf.square(found[-1][2] - found[-1][0]))
            for each in found:
                loss += 1e-6 * tf.reduce_sum(tf.square(gram(each[1]) - gram(each[2])))
        applied(tape, loss, optimizer, [image])
        return loss

    return step


def deep_dream() -> Any:
    """Gradient ascent on the image that is given: no weights are trained, no optimizer is there."""
    network = keras.applications.MobileNetV2(weights=None, include_top=False, input_shape=(96, 96, 3))

    @tf.function
    def ascent(image: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(image)
            loss = tf.reduce_mean(tf.square(network(image)[:, 1:-1, 1:-1]))
        gradient = tape.gradient(loss, image)
        return loss, image + 0.01 * gradient / tf.maximum(tf.reduce_mean(tf.abs(gradient)), 1e-6)

    return ascent


def actor_and_critic() -> Any:
    """Deep deterministic policy gradient: two networks that learn, two that follow them slowly."""

    def actor() -> Any:
        state = keras.Input((3,))
        x = layers.Dense(256, activation="relu")(layers.Dense(256, activation="relu")(state))
        return keras.Model(state, layers.Dense(1, activation="tanh")(x) * 2.0)

    def critic() -> Any:
        state, action = keras.Input((3,)), keras.Input((1,))
        x = layers.Concatenate()([layers.Dense(32, activation="relu")(state), layers.Dense(32)(action)])
        x = layers.Dense(256, activation="relu")(layers.Dense(256, activation="relu")(x))
        return keras.Model([state, action], layers.Dense(1)(x))

    acts, acts_slowly, judges, judges_slowly = actor(), actor(), critic(), critic()
    a_optimizer, c_optimizer = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(2e-3)

    @tf.function
    def update(state: Any, action: Any, reward: Any, after: Any) -> None:
        with tf.GradientTape() as tape:
            y = reward + 0.99 * judges_slowly([after, acts_slowly(after, training=True)], training=True)
            loss = ops.mean(ops.square(y - judges([state, action], training=True)))
        applied(tape, loss, c_optimizer, judges.trainable_variables)
        with tf.GradientTape() as tape:
            loss = -ops.mean(judges([state, acts(state, training=True)], training=True))
        applied(tape, loss, a_optimizer, acts.trainable_variables)
        for fast, slow in ((acts, acts_slowly), (judges, judges_slowly)):
            for one, other in zip(fast.variables, slow.variables, strict=True):
                other.assign(0.005 * one + 0.995 * other)

    return update


def policy_gradient() -> Any:
    """Proximal policy optimisation: one step of the policy, on what was seen before."""
    state = keras.Input((4,))
    x = layers.Dense(64, activation="tanh")(layers.Dense(64, activation="tanh")(state))
    policy, optimizer = keras.Model(state, layers.Dense(2)(x)), keras.optimizers.Adam(3e-4)

    @tf.function
    def train_policy(observed: Any, action: Any, likelihood: Any, advantage: Any) -> Any:
        with tf.GradientTape() as tape:
            found = keras.ops.sum(keras.ops.one_hot(action, 2) * keras.ops.log_softmax(policy(observed)), axis=1)
            ratio = keras.ops.exp(found - likelihood)
            least = keras.ops.where(advantage > 0, 1.2 * advantage, 0.8 * advantage)
            loss = -keras.ops.mean(keras.ops.minimum(ratio * advantage, least))
        applied(tape, loss, optimizer, policy.trainable_variables)
        return keras.ops.sum(likelihood - found)

    return train_policy


def few_shots() -> Any:
    """Reptile's inner loop, unrolled over a few small batches, then the outer update by hand."""
    image = keras.Input((28, 28, 1))
    x = image
    for _ in range(4):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(64, 3, strides=2, padding="same")(x)))
    model = keras.Model(image, layers.Dense(5, activation="softmax")(layers.Flatten()(x)))
    optimizer, loss_of = keras.optimizers.SGD(0.003), keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def train_task(images: Any, labels: Any) -> Any:
        before = [tf.identity(each) for each in model.trainable_variables]
        for part, wanted in zip(tf.split(images, 4), tf.split(labels, 4), strict=True):
            with tf.GradientTape() as tape:
                loss = loss_of(wanted, model(part, training=True))
            applied(tape, loss, optimizer, model.trainable_variables)
        for old, each in zip(before, model.trainable_variables, strict=True):
            each.assign(old + 0.25 * (each - old))
        return loss

    return train_task


def sums_of_gradients() -> Any:
    """Gradients added up over a loop of TensorFlow's own, then applied once; written for eager use as well."""
    network = keras.Sequential(
        [keras.Input((64,), dtype="int32"), layers.Embedding(2000, 64), layers.LSTM(64), layers.Dense(4)]
    )
    optimizer, loss_of = keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(texts: Any, labels: Any) -> Any:
        sums = [tf.zeros(each.shape) for each in network.trainable_variables]
        for place in tf.range(4):
            with tf.GradientTape() as tape:
                loss = loss_of(labels[place::4], network(texts[place::4], training=True))
            found = tape.gradient(loss, network.trainable_variables)
            sums = [total + tf.convert_to_tensor(each) for total, each in zip(sums, found, strict=True)]
        optimizer.apply(sums, network.trainable_variables)
        return loss

    return step
