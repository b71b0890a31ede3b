"""Models with a training step of their own, most without `call()`: what Keras's published examples do, at small size.

Every function returns a model that its own code compiled, so that each can be named as "zoo_steps.py:function".
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

layers, ops = keras.layers, keras.ops


class Latent(layers.Layer):
    """A normal sample by reparametrisation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    """An encoder, a decoder, three metrics, one optimizer."""

    def __init__(self, encoder: Any, decoder: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.trackers = [keras.metrics.Mean(name=name) for name in ("total", "reconstruction", "divergence")]

    @property
    def metrics(self) -> Any:
        return self.trackers

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            mean, log_variance, latent = self.encoder(data)
            image = self.decoder(latent)
            each = ops.sum(keras.losses.binary_crossentropy(data, image), axis=(1, 2))
            reconstruction = ops.mean(each)
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            divergence = ops.mean(ops.sum(divergence, axis=1))
            total = reconstruction + divergence
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, value in zip(self.trackers, (total, reconstruction, divergence), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def vae() -> Any:
    image = keras.Input((28, 28, 1))
    x = layers.Conv2D(32, 3, activation="relu", strides=2, padding="same")(image)
    x = layers.Conv2D(64, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    mean, log_variance = layers.Dense(2, name="mean")(x), layers.Dense(2, name="log_variance")(x)
    encoder = keras.Model(image, [mean, log_variance, Latent()([mean, log_variance])], name="encoder")
    latent = keras.Input((2,))
    x = layers.Reshape((7, 7, 64))(layers.Dense(7 * 7 * 64, activation="relu")(latent))
    x = layers.Conv2DTranspose(64, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Conv2DTranspose(32, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x)
    model = VAE(encoder, keras.Model(latent, x, name="decoder"))
    model.compile(optimizer=keras.optimizers.Adam())
    return model


def image_critic(side: int, channels: int = 3) -> Any:
    return keras.Sequential(
        [
            keras.Input((side, side, channels)),
            layers.Conv2D(32, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(64, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(1),
        ],
        name="discriminator",
    )


def image_generator(side: int, latent: int, channels: int = 3) -> Any:
    small = side // 4
    return keras.Sequential(
        [
            keras.Input((latent,)),
            layers.Dense(small * small * 64),
            layers.Reshape((small, small, 64)),
            layers.Conv2DTranspose(64, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(128, 4, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.Conv2D(channels, 5, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class GAN(keras.Model):
    """A generator and a discriminator, each with an optimizer of its own, given to a `compile()` of its own."""

    def __init__(self, discriminator: Any, generator: Any, latent: int) -> None:
        super().__init__()
        self.discriminator, self.generator, self.latent = discriminator, generator, latent
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric, self.g_loss_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> Any:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, images: Any) -> Any:
        batch = ops.shape(images)[0]
        made = self.generator(keras.random.normal((batch, self.latent), seed=self.seed_generator))
        both = ops.concatenate([made, images], axis=0)
        labels = ops.concatenate([ops.ones((batch, 1)), ops.zeros((batch, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))
        noise = keras.random.normal((batch, self.latent), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((batch, 1)), self.discriminator(self.generator(noise)))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def dcgan() -> Any:
    model = GAN(image_critic(32), image_generator(32, 64), 64)
    model.compile(
        keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    return model


class WGAN(keras.Model):
    """A critic that is trained three times a step, with a penalty on the gradient of its output by its input."""

    def __init__(self, critic: Any, generator: Any, latent: int) -> None:
        super().__init__()
        self.critic, self.generator, self.latent = critic, generator, latent
        self.d_steps, self.gp_weight = 3, 10.0

    def compile(self, d_optimizer: Any, g_optimizer: Any, d_loss_fn: Any, g_loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def gradient_penalty(self, batch: Any, images: Any, made: Any) -> Any:
        alpha = tf.random.uniform([batch, 1, 1, 1], 0.0, 1.0)
        between = images + alpha * (made - images)
        with tf.GradientTape() as tape:
            tape.watch(between)
            output = self.critic(between, training=True)
        gradients = tape.gradient(output, [between])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradients), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, images: Any) -> Any:
        if isinstance(images, tuple):
            images = images[0]
        batch = tf.shape(images)[0]
        for _ in range(self.d_steps):
            noise = tf.random.normal(shape=(batch, self.latent))
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                fake, real = self.critic(made, training=True), self.critic(images, training=True)
                penalty = self.gradient_penalty(batch, images, made)
                d_loss = self.d_loss_fn(real, fake) + penalty * self.gp_weight
            gradients = tape.gradient(d_loss, self.critic.trainable_variables)
            self.d_optimizer.apply_gradients(zip(gradients, self.critic.trainable_variables, strict=True))
        noise = tf.random.normal(shape=(batch, self.latent))
        with tf.GradientTape() as tape:
            g_loss = self.g_loss_fn(self.critic(self.generator(noise, training=True), training=True))
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def wgan_gp() -> Any:
    model = WGAN(image_critic(28, 1), image_generator(28, 64, 1), 64)
    model.compile(
        keras.optimizers.Adam(2e-4, beta_1=0.5, beta_2=0.9),
        keras.optimizers.Adam(2e-4, beta_1=0.5, beta_2=0.9),
        lambda real, fake: tf.reduce_mean(fake) - tf.reduce_mean(real),
        lambda fake: -tf.reduce_mean(fake),
    )
    return model


def denoiser(side: int, width: int) -> Any:
    """A U-Net of residual blocks with group normalisation, an attention block and the time's embedding."""
    image, time = keras.Input((side, side, 3)), keras.Input((), dtype="int64")
    embedded = layers.Embedding(1000, width * 4)(time)
    embedded = layers.Dense(width * 4)(layers.Dense(width * 4, activation="silu")(embedded))

    def block(x: Any, channels: int) -> Any:
        kept = x if x.shape[-1] == channels else layers.Conv2D(channels, 1)(x)
        by_time = layers.Dense(channels)(layers.Activation("silu")(embedded))
        x = layers.Activation("silu")(layers.GroupNormalization(8)(x))
        x = layers.Conv2D(channels, 3, padding="same")(x) + layers.Reshape((1, 1, channels))(by_time)
        x = layers.Activation("silu")(layers.GroupNormalization(8)(x))
        return layers.Add()([layers.Conv2D(channels, 3, padding="same")(x), kept])

    x = layers.Conv2D(width, 3, padding="same")(image)
    skips = [x]
    for factor in (1, 2):
        x = block(x, width * factor)
        skips.append(x)
        x = layers.Conv2D(width * factor, 3, strides=2, padding="same")(x)
    flat = layers.Reshape((-1, width * 2))(layers.GroupNormalization(8)(x))
    flat = layers.MultiHeadAttention(1, width * 2)(flat, flat)
    x = layers.Add()([x, layers.Reshape((side // 4, side // 4, width * 2))(flat)])
    for factor in (2, 1):
        x = layers.Conv2D(width * factor, 3, padding="same")(layers.UpSampling2D(2, interpolation="nearest")(x))
        x = block(layers.Concatenate()([x, skips.pop()]), width * factor)
    x = layers.Activation("silu")(layers.GroupNormalization(8)(x))
    return keras.Model([image, time], layers.Conv2D(3, 3, padding="same", kernel_initializer="zeros")(x))


class Diffusion(keras.Model):
    """A denoising network and a slow copy of it; the loss is the model's, of noise that the step itself draws."""

    def __init__(self, network: Any, ema_network: Any, steps: int = 1000) -> None:
        super().__init__()
        self.network, self.ema_network, self.steps, self.ema = network, ema_network, steps, 0.999
        signal = tf.math.cumprod(1.0 - tf.linspace(1e-4, 0.02, steps))
        self.signal, self.noise = tf.sqrt(signal), tf.sqrt(1.0 - signal)

    def train_step(self, images: Any) -> Any:
        batch = tf.shape(images)[0]
        time = tf.random.uniform(minval=0, maxval=self.steps, shape=(batch,), dtype=tf.int64)
        with tf.GradientTape() as tape:
            noise = tf.random.normal(shape=tf.shape(images), dtype=images.dtype)
            scale = tf.reshape(tf.gather(self.signal, time), [batch, 1, 1, 1])
            noisy = scale * images + tf.reshape(tf.gather(self.noise, time), [batch, 1, 1, 1]) * noise
            loss = self.loss(noise, self.network([noisy, time], training=True))
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        for weight, slow in zip(self.network.weights, self.ema_network.weights, strict=True):
            slow.assign(self.ema * slow + (1 - self.ema) * weight)
        return {"loss": loss}


def ddpm() -> Any:
    network, slow = denoiser(32, 32), denoiser(32, 32)
    slow.set_weights(network.get_weights())
    model = Diffusion(network, slow)
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.Adam(2e-4))
    return model


def applied(tape: Any, loss: Any, optimizer: Any, weights: Any) -> None:
    """Apply the gradients of a loss."""
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class Implicit(keras.Model):
    """Diffusion in continuous time: normalised images, a noise schedule by angle, two losses, a slow copy."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network, self.ema_network = denoiser(32, 16), denoiser(32, 16)

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.noise_loss, self.image_loss = (keras.metrics.Mean(name=name) for name in ("n_loss", "i_loss"))

    @property
    def metrics(self) -> Any:
        return [self.noise_loss, self.image_loss]

    def train_step(self, images: Any) -> Any:
        images = self.normalizer(images, training=True)
        batch = ops.shape(images)[0]
        noise = keras.random.normal(ops.shape(images))
        times = keras.random.uniform((batch, 1, 1, 1))
        angles = ops.arccos(0.95) + times * (ops.arccos(0.02) - ops.arccos(0.95))
        signal_rate, noise_rate = ops.cos(angles), ops.sin(angles)
        noisy = signal_rate * images + noise_rate * noise
        with tf.GradientTape() as tape:
            found = self.network([noisy, ops.cast(ops.reshape(times * 999, (batch,)), "int64")], training=True)
            noise_loss = self.loss(noise, found)
            image_loss = self.loss(images, (noisy - noise_rate * found) / signal_rate)
        applied(tape, noise_loss, self.optimizer, self.network.trainable_weights)
        self.noise_loss.update_state(noise_loss)
        self.image_loss.update_state(image_loss)
        for weight, slow in zip(self.network.weights, self.ema_network.weights, strict=True):
            slow.assign(0.999 * slow + 0.001 * weight)
        return {each.name: each.result() for each in self.metrics}


def ddim() -> Any:
    model = Implicit()
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=keras.losses.mean_absolute_error)
    return model


class ConditionalGAN(GAN):
    """The class of an image beside it, in both networks."""

    def train_step(self, data: Any) -> Any:
        images, classes = data
        batch, (height, width) = ops.shape(images)[0], images.shape[1:3]
        maps = ops.broadcast_to(classes[:, None, None, :], (batch, height, width, classes.shape[-1]))

        def made() -> Any:
            noise = keras.random.normal((batch, self.latent), seed=self.seed_generator)
            return self.generator(ops.concatenate([noise, classes], axis=1))

        both = ops.concatenate([ops.concatenate([made(), maps], -1), ops.concatenate([images, maps], -1)], axis=0)
        labels = ops.concatenate([ops.ones((batch, 1)), ops.zeros((batch, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        applied(tape, d_loss, self.d_optimizer, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((batch, 1)), self.discriminator(ops.concatenate([made(), maps], -1)))
        applied(tape, g_loss, self.g_optimizer, self.generator.trainable_weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def conditional_gan() -> Any:
    model = ConditionalGAN(image_critic(28, 11), image_generator(28, 74, 1), 64)
    model.compile(
        keras.optimizers.Adam(3e-4), keras.optimizers.Adam(3e-4), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    return model


class ReflectionPadding(layers.Layer):
    """Pads an image with its mirror."""

    def call(self, x: Any) -> Any:
        return tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT")


def translator() -> Any:
    image = keras.Input((32, 32, 3))
    x = layers.ReLU()(layers.GroupNormalization(-1)(layers.Conv2D(32, 3, strides=2, padding="same")(image)))
    for _ in range(2):
        y = layers.Conv2D(32, 3, use_bias=False)(ReflectionPadding()(x))
        y = layers.ReLU()(layers.GroupNormalization(-1)(y))
        x = layers.add([x, layers.GroupNormalization(-1)(layers.Conv2D(32, 3, use_bias=False)(ReflectionPadding()(y)))])
    x = layers.ReLU()(layers.GroupNormalization(-1)(layers.Conv2DTranspose(32, 3, strides=2, padding="same")(x)))
    return keras.Model(image, layers.Conv2D(3, 3, padding="same", activation="tanh")(x))


class CycleGAN(keras.Model):
    """Two generators and two discriminators, four optimizers, one persistent tape."""

    def __init__(self) -> None:
        super().__init__()
        self.gen_g, self.gen_f, self.disc_x, self.disc_y = (
            translator(),
            translator(),
            image_critic(32),
            image_critic(32),
        )

    def call(self, inputs: Any) -> Any:
        return self.disc_x(inputs), self.disc_y(inputs), self.gen_g(inputs), self.gen_f(inputs)

    def compile(self, optimizers: Any) -> None:
        super().compile()
        self.gen_g_optimizer, self.gen_f_optimizer, self.disc_x_optimizer, self.disc_y_optimizer = optimizers
        self.cycle_loss, self.adversarial = keras.losses.MeanAbsoluteError(), keras.losses.MeanSquaredError()

    def train_step(self, batch_data: Any) -> Any:
        real_x, real_y = batch_data
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_g(real_x, training=True), self.gen_f(real_y, training=True)
            cycled_x, cycled_y = self.gen_f(fake_y, training=True), self.gen_g(fake_x, training=True)
            seen = [self.disc_x(each, training=True) for each in (real_x, fake_x)]
            seen += [self.disc_y(each, training=True) for each in (real_y, fake_y)]
            cycle = [self.cycle_loss(real_y, cycled_y) * 10, self.cycle_loss(real_x, cycled_x) * 10]
            g_loss = self.adversarial(ops.ones_like(seen[3]), seen[3]) + cycle[0]
            f_loss = self.adversarial(ops.ones_like(seen[1]), seen[1]) + cycle[1]
            x_loss, y_loss = (
                0.5 * (self.adversarial(ops.ones_like(real), real) + self.adversarial(ops.zeros_like(fake), fake))
                for real, fake in (seen[:2], seen[2:])
            )
        applied(tape, g_loss, self.gen_g_optimizer, self.gen_g.trainable_variables)
        applied(tape, f_loss, self.gen_f_optimizer, self.gen_f.trainable_variables)
        applied(tape, x_loss, self.disc_x_optimizer, self.disc_x.trainable_variables)
        applied(tape, y_loss, self.disc_y_optimizer, self.disc_y.trainable_variables)
        return {"G_loss": g_loss, "F_loss": f_loss, "D_X_loss": x_loss, "D_Y_loss": y_loss}


def cycle_gan() -> Any:
    model = CycleGAN()
    model.compile([keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(4)])
    return model


class Quantizer(layers.Layer):
    """The nearest of some learnt vectors, and the gradient straight through."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count, self.width = count, width
        self.vectors = self.add_weight(shape=(width, count), initializer="random_uniform", name="vectors")

    def call(self, x: Any) -> Any:
        flat = ops.reshape(x, (-1, self.width))
        apart = ops.sum(flat**2, axis=1, keepdims=True) + ops.sum(self.vectors**2, axis=0)
        nearest = ops.one_hot(ops.argmin(apart - 2 * ops.matmul(flat, self.vectors), axis=1), self.count)
        quantized = ops.reshape(ops.matmul(nearest, ops.transpose(self.vectors)), ops.shape(x))
        stop = ops.stop_gradient
        self.add_loss(0.25 * ops.mean((stop(quantized) - x) ** 2) + ops.mean((quantized - stop(x)) ** 2))
        return x + stop(quantized - x)


class VQVAE(keras.Model):
    """An autoencoder through the quantizer, whose losses the step adds."""

    def __init__(self) -> None:
        super().__init__()
        image = keras.Input((28, 28, 1))
        x = layers.Conv2D(32, 3, activation="relu", strides=2, padding="same")(image)
        x = layers.Conv2D(16, 1, padding="same")(layers.Conv2D(64, 3, activation="relu", strides=2, padding="same")(x))
        x = Quantizer(64, 16)(x)
        for width in (64, 32):
            x = layers.Conv2DTranspose(width, 3, activation="relu", strides=2, padding="same")(x)
        self.vqvae = keras.Model(image, layers.Conv2DTranspose(1, 3, padding="same")(x))
        self.total = keras.metrics.Mean(name="loss")

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            total = ops.mean((x - self.vqvae(x)) ** 2) / 0.1 + sum(self.vqvae.losses)
        applied(tape, total, self.optimizer, self.vqvae.trainable_variables)
        self.total.update_state(total)
        return {"loss": self.total.result()}


def vq_vae() -> Any:
    model = VQVAE()
    model.compile(optimizer=keras.optimizers.Adam())
    return model


class MaskedAutoencoder(keras.Model):
    """Three quarters of an image's patches are hidden, and restored."""

    def __init__(self) -> None:
        super().__init__()
        self.augment = keras.Sequential([layers.Rescaling(1 / 255.0), layers.RandomFlip("horizontal")])
        self.project, self.positions = layers.Dense(64), layers.Embedding(64, 64)
        self.encoder, self.decoder = self.transformer(16), self.transformer(64)
        self.restore = layers.Dense(48)

    @staticmethod
    def transformer(length: int) -> Any:
        tokens = x = keras.Input((length, 64))
        for _ in range(2):
            y = layers.LayerNormalization(epsilon=1e-6)(x)
            x = layers.Add()([layers.MultiHeadAttention(4, 16, dropout=0.1)(y, y), x])
            y = layers.Dense(128, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
            x = layers.Add()([layers.Dense(64)(y), x])
        return keras.Model(tokens, x)

    def build(self, shape: Any) -> None:
        self.mask_token = self.add_weight(shape=(1, 48), initializer="random_normal", name="mask")

    def train_step(self, images: Any) -> Any:
        if not hasattr(self, "mask_token"):
            self.build(images.shape)
        with tf.GradientTape() as tape:
            images = self.augment(images)
            patches = ops.reshape(ops.image.extract_patches(images, 4), (-1, 64, 48))
            order = tf.argsort(tf.random.uniform((tf.shape(images)[0], 64)), axis=-1)
            hidden, kept = order[:, :48], order[:, 48:]
            embedded = self.project(patches) + self.positions(ops.arange(64))
            encoded = self.encoder(tf.gather(embedded, kept, axis=1, batch_dims=1))
            tokens = self.project(ops.tile(self.mask_token, (48, 1)))
            tokens = ops.broadcast_to(tokens, (ops.shape(images)[0], 48, 64)) + self.positions(hidden)
            found = self.restore(self.decoder(ops.concatenate([encoded, tokens], axis=1)))
            loss = self.loss(
                tf.gather(patches, hidden, axis=1, batch_dims=1), tf.gather(found, hidden, axis=1, batch_dims=1)
            )
        applied(tape, loss, self.optimizer, self.trainable_variables)
        return {"loss": loss}


def masked_autoencoder() -> Any:
    model = MaskedAutoencoder()
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=keras.losses.MeanSquaredError())
    return model


def small_encoder() -> Any:
    return keras.Sequential(
        [keras.Input((32, 32, 3)), layers.Rescaling(1 / 127.5, offset=-1)]
        + [layers.Conv2D(width, 3, strides=2, activation="relu", padding="same") for width in (32, 64, 64)]
        + [layers.Flatten(), layers.Dense(64, activation="relu")]
    )


class SimSiam(keras.Model):
    """Two views of an image, one encoder, a predictor, and no gradient for the other view."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = small_encoder()
        self.predictor = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(32, use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Dense(64),
            ]
        )
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker]

    def train_step(self, data: Any) -> Any:
        one, other = data
        with tf.GradientTape() as tape:
            z1, z2 = self.encoder(one), self.encoder(other)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            loss = (
                sum(
                    -tf.reduce_mean(
                        tf.reduce_sum(tf.math.l2_normalize(p, 1) * tf.math.l2_normalize(tf.stop_gradient(z), 1), 1)
                    )
                    for p, z in ((p1, z2), (p2, z1))
                )
                / 2
            )
        applied(tape, loss, self.optimizer, [*self.encoder.trainable_variables, *self.predictor.trainable_variables])
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def simsiam() -> Any:
    model = SimSiam()
    schedule = keras.optimizers.schedules.CosineDecay(0.03, decay_steps=100)
    model.compile(optimizer=keras.optimizers.SGD(schedule, momentum=0.6))
    return model


class SimCLR(keras.Model):
    """Contrasts views of images without labels, and probes with those that have some: two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.augment = keras.Sequential(
            [keras.Input((32, 32, 3)), layers.RandomFlip("horizontal"), layers.RandomZoom(0.2)]
        )
        self.encoder = small_encoder()
        self.head = keras.Sequential([keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(64)])
        self.probe = keras.Sequential([keras.Input((64,)), layers.Dense(10)])

    def compile(self, contrastive_optimizer: Any, probe_optimizer: Any, **options: Any) -> None:
        super().compile(**options)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracies = [keras.metrics.SparseCategoricalAccuracy(name=name) for name in ("c_acc", "r_acc", "p_acc")]

    def train_step(self, data: Any) -> Any:
        (unlabelled, labelled), labels = data
        images = ops.concatenate((unlabelled, labelled), axis=0)
        one, other = self.augment(images, training=True), self.augment(images, training=True)
        with tf.GradientTape() as tape:
            z1, z2 = (ops.normalize(self.head(self.encoder(each, training=True)), axis=1) for each in (one, other))
            alike = ops.matmul(z1, ops.transpose(z2)) / 0.1
            own = ops.arange(ops.shape(z1)[0])
            both = (alike, ops.transpose(alike))
            loss = sum(keras.losses.sparse_categorical_crossentropy(own, each, from_logits=True) for each in both) / 2
        for accuracy, each in zip(self.accuracies, both, strict=False):
            accuracy.update_state(own, each)
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        applied(tape, loss, self.contrastive_optimizer, weights)
        with tf.GradientTape() as tape:
            classes = self.probe(self.encoder(self.augment(labelled, training=True), training=False), training=True)
            probe_loss = self.probe_loss(labels, classes)
        applied(tape, probe_loss, self.probe_optimizer, self.probe.trainable_weights)
        self.accuracies[2].update_state(labels, classes)
        return {each.name: each.result() for each in self.accuracies}


def simclr() -> Any:
    model = SimCLR()
    model.compile(contrastive_optimizer=keras.optimizers.Adam(), probe_optimizer=keras.optimizers.Adam())
    return model


class MaskedLanguageModel(keras.Model):
    """A functional model with a step that draws its own mask."""

    def train_step(self, inputs: Any) -> Any:
        features = inputs
        hidden = tf.random.uniform(tf.shape(features)) < 0.15
        with tf.GradientTape() as tape:
            predictions = self(tf.where(hidden, 1, features), training=True)
            each = keras.losses.sparse_categorical_crossentropy(features, predictions)
            loss = tf.reduce_sum(each * tf.cast(hidden, each.dtype)) / 8.0
        applied(tape, loss, self.optimizer, self.trainable_variables)
        return {"loss": loss}


def masked_language_model() -> Any:
    tokens = keras.Input((32,), dtype="int32")
    x = layers.Embedding(2000, 64)(tokens) + layers.Embedding(32, 64)(ops.arange(32))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, activation="relu")(x)))
    model = MaskedLanguageModel(tokens, layers.Dense(2000, activation="softmax")(x))
    model.compile(optimizer=keras.optimizers.Adam())
    return model


class Siamese(keras.Model):
    """Three images through one network, and a margin between two distances."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = keras.applications.MobileNetV2(
            weights=None, include_top=False, pooling="avg", input_shape=(48, 48, 3), alpha=0.35
        )
        for layer in self.embed.layers[:60]:
            layer.trainable = False
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        anchor, positive, negative = (self.embed(each) for each in inputs)
        return ops.sum(tf.square(anchor - positive), -1), ops.sum(tf.square(anchor - negative), -1)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            near, far = self(data[0] if len(data) == 1 else data)
            loss = tf.maximum(near - far + 0.5, 0.0)
        applied(tape, loss, self.optimizer, self.embed.trainable_weights)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker]


def siamese_triplets() -> Any:
    model = Siamese()
    model.compile(optimizer=keras.optimizers.Adam(1e-4), weighted_metrics=[])
    return model


class Embedding(keras.Model):
    """Anchors and positives of each class in one batch; the classes are the rows of their likeness."""

    def train_step(self, data: Any) -> Any:
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[:, 0], data[:, 1]
        with tf.GradientTape() as tape:
            alike = keras.ops.einsum("ae,pe->ap", self(anchors, training=True), self(positives, training=True)) / 0.2
            labels = keras.ops.arange(keras.ops.shape(alike)[0])
            loss = self.compute_loss(y=labels, y_pred=alike)
        applied(tape, loss, self.optimizer, self.trainable_variables)
        return {"loss": loss}


def metric_learning() -> Any:
    image = keras.Input((32, 32, 3))
    x = image
    for width in (32, 64):
        x = layers.Conv2D(width, 3, strides=2, activation="relu")(x)
    x = layers.UnitNormalization()(layers.Dense(8)(layers.GlobalAveragePooling2D()(x)))
    model = Embedding(image, x)
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Distiller(keras.Model):
    """A small network learns from a large one: `compute_loss` is its own, the step is Keras's."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        soft = ops.softmax(self.teacher(x, training=False) / 3, axis=1)
        distilled = keras.losses.KLDivergence()(soft, ops.softmax(y_pred / 3, axis=1)) * 9
        known = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)
        return 0.1 * known + 0.9 * distilled

    def call(self, x: Any) -> Any:
        return self.student(x)


def distillation() -> Any:
    def network(width: int) -> Any:
        return keras.Sequential(
            [keras.Input((28, 28, 1)), layers.Conv2D(width, 3, strides=2, padding="same"), layers.LeakyReLU(),
             layers.MaxPooling2D(2, 1, "same"), layers.Conv2D(width * 2, 3, strides=2, padding="same"),
             layers.Flatten(), layers.Dense(10)]
        )  # fmt: skip

    model = Distiller(network(16), network(96))
    model.compile(optimizer=keras.optimizers.Adam(), metrics=[keras.metrics.SparseCategoricalAccuracy()],
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))  # fmt: skip
    return model


class ZeroDCE(keras.Model):
    """Curves that lighten an image, learnt without a reference; `compile` takes a learning rate."""

    def __init__(self) -> None:
        super().__init__()
        image = keras.Input((None, None, 3))
        first = layers.Conv2D(32, 3, activation="relu", padding="same")(image)
        second = layers.Conv2D(32, 3, activation="relu", padding="same")(first)
        both = layers.Concatenate()([first, layers.Conv2D(32, 3, activation="relu", padding="same")(second)])
        self.dce_model = keras.Model(image, layers.Conv2D(24, 3, activation="tanh", padding="same")(both))

    def compile(self, learning_rate: float, **options: Any) -> None:
        super().compile(**options)
        self.optimizer = keras.optimizers.Adam(learning_rate=learning_rate)
        self.total = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self) -> Any:
        return [self.total]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            curves = self.dce_model(data)
            x = data
            for place in range(0, 24, 3):
                x = x + curves[:, :, :, place : place + 3] * (tf.square(x) - x)
            rough = tf.reduce_mean(tf.square(curves[:, 1:] - curves[:, :-1]))
            light = tf.reduce_mean(
                tf.square(tf.nn.avg_pool2d(tf.reduce_mean(x, 3, keepdims=True), 16, 16, "VALID") - 0.6)
            )
            mean = tf.reduce_mean(x, axis=(1, 2), keepdims=True)
            grey = tf.reduce_mean(
                tf.sqrt(tf.square(mean[..., 0] - mean[..., 1]) + tf.square(mean[..., 2] - mean[..., 0]))
            )
            total = 200 * rough + 10 * light + 5 * grey
        applied(tape, total, self.optimizer, self.dce_model.trainable_weights)
        self.total.update_state(total)
        return {"total_loss": self.total.result()}


def zero_dce() -> Any:
    model = ZeroDCE()
    model.compile(learning_rate=1e-4)
    return model


class NeRF(keras.Model):
    """Colours along rays through a scene."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.nerf_model = network

    def compile(self, optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.optimizer, self.loss_fn = optimizer, loss_fn
        self.loss_tracker, self.psnr_metric = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="psnr")

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker, self.psnr_metric]

    def train_step(self, inputs: Any) -> Any:
        images, flat = inputs[0] if len(inputs) == 1 else inputs
        with tf.GradientTape() as tape:
            found = tf.reshape(
                self.nerf_model(tf.reshape(flat, (-1, 16 * 16 * 8, 99)), training=True), (-1, 16, 16, 8, 4)
            )
            colour, density = tf.sigmoid(found[..., :-1]), tf.nn.relu(found[..., -1])
            passed = tf.exp(-density * 0.1)
            weights = (1.0 - passed) * tf.math.cumprod(passed + 1e-10, axis=-1, exclusive=True)
            drawn = tf.reduce_sum(weights[..., None] * colour, axis=-2)
            loss = self.loss_fn(images, drawn)
        applied(tape, loss, self.optimizer, self.nerf_model.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.psnr_metric.update_state(tf.image.psnr(images, drawn, max_val=1.0))
        return {each.name: each.result() for each in self.metrics}


def nerf() -> Any:
    inputs = x = keras.Input((16 * 16 * 8, 99))
    for place in range(4):
        x = layers.Dense(64, activation="relu")(x)
        if place == 2:
            x = layers.concatenate([x, inputs], axis=-1)
    model = NeRF(keras.Model(inputs, layers.Dense(4)(x)))
    model.compile(optimizer=keras.optimizers.Adam(), loss_fn=keras.losses.MeanSquaredError())
    return model


class RealNVP(keras.Model):
    """Coupling layers that turn points into a normal distribution; the loss is a log-likelihood."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.masks = keras.ops.convert_to_tensor([[0.0, 1.0], [1.0, 0.0]] * (count // 2))
        self.couplings = [self.coupling() for _ in range(count)]
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @staticmethod
    def coupling() -> Any:
        point = keras.Input((2,))

        def branch(activation: str) -> Any:
            x = point
            for _ in range(3):
                x = layers.Dense(64, activation="relu", kernel_regularizer=keras.regularizers.l2(0.01))(x)
            return layers.Dense(2, activation=activation, kernel_regularizer=keras.regularizers.l2(0.01))(x)

        return keras.Model(point, [branch("tanh"), branch("linear")])

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker]

    def call(self, x: Any) -> Any:
        volume = 0
        for place in reversed(range(len(self.couplings))):
            kept = x * self.masks[place]
            rest = 1 - self.masks[place]
            scale, shift = (each * rest for each in self.couplings[place](kept))
            x = rest * ((x - shift) * ops.exp(-scale)) + kept
            volume -= ops.sum(scale, axis=1)
        return x, volume

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            y, volume = self(data)
            loss = -ops.mean(-0.5 * ops.sum(y**2, axis=1) + volume)
        applied(tape, loss, self.optimizer, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def real_nvp() -> Any:
    model = RealNVP(6)
    model.compile(optimizer=keras.optimizers.Adam(1e-4))
    return model


class TwoRates(keras.Model):
    """A functional model whose backbone and head have an optimizer each."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        half = len(self.trainable_variables) // 2
        gradients = tape.gradient(loss, self.trainable_variables)
        for optimizer, part in ((self.slow, slice(half)), (self.fast, slice(half, None))):
            optimizer.apply(gradients[part], self.trainable_variables[part])
        return {"loss": loss}


def two_learning_rates() -> Any:
    image = keras.Input((32, 32, 3))
    x = layers.Flatten()(layers.Conv2D(32, 3, strides=2, activation="relu")(image))
    model = TwoRates(image, layers.Dense(10, activation="softmax")(layers.Dense(64, activation="relu")(x)))
    model.slow, model.fast = keras.optimizers.SGD(1e-5, momentum=0.9), keras.optimizers.AdamW(1e-3)
    model.compile(loss="sparse_categorical_crossentropy")
    return model


class Accumulating(keras.Model):
    """Adds gradients up in variables of its own and applies them every fourth step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.sums = [tf.Variable(tf.zeros(each.shape), trainable=False) for each in self.trainable_variables]

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.seen.assign_add(1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient)
        tf.cond(tf.equal(self.seen, 4), self.apply_sums, lambda: None)
        return {"loss": loss}

    def apply_sums(self) -> None:
        self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))
        self.seen.assign(0)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def gradient_accumulation() -> Any:
    image = keras.Input((32, 32, 3))
    x = layers.Flatten()(layers.Conv2D(16, 3, strides=2, activation="relu")(image))
    model = Accumulating(image, layers.Dense(10, activation="softmax")(x))
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    return model


class DualEncoder(keras.Model):
    """Images and captions side by side; a batch is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.images = keras.Sequential([small_encoder(), layers.Dense(32)])
        self.texts = keras.Sequential(
            [
                keras.Input((16,), dtype="int32"),
                layers.Embedding(1000, 32),
                layers.GlobalAveragePooling1D(),
                layers.Dense(32),
            ]
        )
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, features: Any, training: bool = False) -> Any:
        return self.texts(features["caption"], training=training), self.images(features["image"], training=training)

    def train_step(self, features: Any) -> Any:
        with tf.GradientTape() as tape:
            texts, images = self(features, training=True)
            logits = ops.matmul(texts, ops.transpose(images)) / 0.05
            alike = ops.matmul(images, ops.transpose(images)) + ops.matmul(texts, ops.transpose(texts))
            targets = keras.activations.softmax(alike / 0.1)
            loss = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
        applied(tape, loss, self.optimizer, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def dual_encoder() -> Any:
    model = DualEncoder()
    model.compile(optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-3))
    return model


class SpeechTransformer(keras.Model):
    """Sound in, letters out; the batch is a dictionary with both, and the step shifts the letters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before = [layers.Conv1D(64, 11, strides=2, padding="same", activation="relu") for _ in range(2)]
        self.letters, self.places = layers.Embedding(34, 64), layers.Embedding(32, 64)
        self.encode, self.own, self.cross = (layers.MultiHeadAttention(2, 32) for _ in range(3))
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(3)]
        self.classify, self.loss_metric = layers.Dense(34), keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        source, target = inputs
        for each in self.before:
            source = each(source)
        source = self.norms[0](source + self.encode(source, source))
        x = self.letters(target) + self.places(ops.arange(ops.shape(target)[-1]))
        x = self.norms[1](x + self.own(x, x, use_causal_mask=True))
        return self.classify(self.norms[2](x + self.cross(x, source)))

    def train_step(self, batch: Any) -> Any:
        source, target = batch["source"], batch["target"]
        with tf.GradientTape() as tape:
            found = self([source, target[:, :-1]])
            hot = ops.one_hot(target[:, 1:], 34)
            loss = self.compute_loss(None, hot, found, sample_weight=ops.not_equal(target[:, 1:], 0))
        applied(tape, loss, self.optimizer, self.trainable_variables)
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}


def speech_transformer() -> Any:
    model = SpeechTransformer()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    return model
