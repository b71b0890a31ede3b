"""Shape inference on real Keras models, files and objects."""

from __future__ import annotations

import gc
import math

import keras
import numpy as np
import pytest

from kerasmem.errors import ModelError, UsageError
from kerasmem.estimation import estimating

layers = keras.layers


def estimate(source, **options):
    """Estimate by the formula unless a test says otherwise: most here are about shapes."""
    return estimating.estimate(source, **{"method": "formula", **options})


def rows(report):
    return {row.name: row for row in report.layers}


def test_mnist_cnn_exactly(mnist_cnn, tmp_path):
    mnist_cnn.save(tmp_path / "m.keras")
    (tmp_path / "m.json").write_text(mnist_cnn.to_json())
    mnist_cnn.save(tmp_path / "m.h5")
    for source in (mnist_cnn, tmp_path / "m.h5", str(tmp_path / "m.keras"), tmp_path / "m.json"):
        report = estimate(source, batch_size=100)
        assert report.model.parameters == 1_111_946
        assert report.formula.activation_elements_per_sample == 29_978
        assert report.formula.parameter_bytes == 8_895_568
        assert report.formula.activation_bytes_per_sample == 239_824
        assert report.bytes.total == report.formula.total_bytes == 8_895_568 + 100 * 239_824
        assert [row.activation_elements for row in report.layers] == [784, 18432, 4608, 4096, 1024, 0, 0, 1024, 10]
        assert [row.kind for row in report.layers].count("view") == 2
        assert report.settings.optimizer == "adam"
        assert report.settings.loss == "sparse_categorical_crossentropy"


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [("ResNet50", (224, 224, 3), 25_636_712), ("EfficientNetB0", (64, 64, 3), 5_330_571)],
)
def test_known_networks(name, shape, parameters):
    report = estimate(lambda: getattr(keras.applications, name)(weights=None, input_shape=shape))
    assert report.model.parameters == parameters
    assert sum(row.parameters for row in report.layers) == parameters


def test_inferred_outputs_equal_those_of_a_real_call():
    """Every output of a real forward pass has the size that was inferred."""
    inputs = keras.Input((12, 12, 3))
    x = layers.SeparableConv2D(8, 3, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    y = layers.Conv2DTranspose(8, 3, padding="same")(layers.UpSampling2D()(layers.AveragePooling2D(2)(x)))
    outputs = layers.GlobalMaxPooling2D()(layers.Add()([x, y]) * 2.0)
    model = keras.Model(inputs, [outputs, x])
    report = rows(estimate(model, batch_size=4))
    for layer in model.layers[1:]:
        values = keras.Model(inputs, layer.output)(np.zeros((4, 12, 12, 3), "float32"))
        assert report[layer.name].activation_elements == math.prod(values.shape) // 4, layer.name


def test_shared_layers_count_once_for_parameters_and_per_use_for_activations():
    tower_in = keras.Input((8,))
    tower = keras.Model(tower_in, layers.Dense(4, name="d")(tower_in), name="tower")
    shared = layers.Dense(3, name="shared")
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    model = keras.Model([a, b], [shared(tower(a)), shared(tower(b)), shared(shared.__class__(4)(a))])
    report = estimate(model)
    by_name = rows(report)
    for name, counts in {"tower/d": (2, 36, 8), "shared": (3, 15, 9)}.items():
        row = by_name[name]
        assert (row.uses, row.parameters, row.activation_elements) == counts
    assert report.model.parameters == model.count_params()


def test_tied_weights_count_once():
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(50, 8)

        def call(self, ids):
            return keras.ops.matmul(self.embedding(ids), keras.ops.transpose(self.embedding.embeddings))

    model = Tied()
    model(np.zeros((2, 5), "int32"))
    report = estimate(model, input_shape=(5,))
    assert report.model.parameters == 400
    assert [row.activation_elements for row in report.layers] == [5, 40, 250]  # the product is the model's own row


def test_several_inputs_and_outputs_and_open_dimensions():
    image, text = keras.Input((None, None, 3), name="image"), keras.Input((None,), name="text", dtype="int32")
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(image))
    y = layers.GRU(6)(layers.Embedding(100, 5)(text))
    model = keras.Model({"image": image, "text": text}, {"a": layers.Dense(2)(x), "b": layers.Dense(3)(y)})
    report = estimate(model, input_shape={"image": (32, 48, 3), "text": (7,)})
    assert [row.activation_elements for row in report.layers[:2]] == [32 * 48 * 3, 7]
    assert report.layers[1].activation_bytes == 28
    for given, message in [
        (None, r"unknown dimensions: 'image' .*'text' .*--input-shape image=224,224,3 --input-shape text=128"),
        ({"image": (32, 32, 3)}, "unknown dimensions: 'text'"),
        ({"image": (32, 32, 3), "txt": (7,)}, "must name an input of the model: 'image'.*'text'.*got 'txt'"),
        ({"image": (32, 32, 1), "text": (7,)}, r"--input-shape image must have .*any, 3\); got 32,32,1"),
        (
            {"image": (32, 3), "text": (7,)},
            r"must have 3 sizes without the batch, such as .*, to match \(any, any, any, 3\); got 32,3",
        ),
        ({"image": (0, 32, 3), "text": (7,)}, "at least 1"),
        ("nonsense", "sizes of at least 1 .*got 'nonsense'"),
    ]:
        with pytest.raises(UsageError, match=message):
            estimate(model, input_shape=given)


def test_a_shape_that_is_too_small_for_the_layers():
    image = keras.Input((None, None, 1))
    model = keras.Model(image, layers.MaxPooling2D(4)(layers.Conv2D(2, 5)(image)))
    with pytest.raises(ModelError, match="cannot be called on"):
        estimate(model, input_shape=(4, 4, 1))


def test_frozen_layers():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(2)])
    model.layers[0].trainable = False
    report = estimate(model)
    assert (report.model.parameters, report.model.trainable_parameters) == (46, 10)
    assert any("36 parameters that are not trained" in note for note in report.notes)


def test_dtypes_by_their_true_sizes():
    bytes_in = keras.Input((10, 10, 3), dtype="uint8")
    x = layers.Rescaling(1 / 255, dtype="float32")(bytes_in)
    x = layers.Conv2D(4, 3, dtype="mixed_bfloat16")(x)
    x = layers.Dense(5, dtype="float64")(layers.Flatten(dtype="mixed_bfloat16")(x))
    report = estimate(keras.Model(bytes_in, x))
    assert [row.activation_bytes for row in report.layers] == [300, 1200, 8 * 8 * 4 * 2, 0, 40]
    assert [row.weight_bytes for row in report.layers] == [0, 0, 4 * 112, 0, 8 * (256 * 5 + 5)]
    assert report.bytes.total != report.formula.total_bytes
    assert any("true sizes" in note for note in report.notes)


def test_quantised_weights_by_their_true_sizes(tmp_path):
    model = keras.Sequential([keras.Input((32,)), layers.Dense(16, use_bias=False)])
    model.quantize("int8")
    model.save(tmp_path / "q.keras")
    expected = sum(math.prod(weight.shape) * (1 if weight.dtype == "int8" else 4) for weight in model.weights)
    assert expected < 32 * 16 * 4 / 3
    for source in (model, tmp_path / "q.keras"):
        assert estimate(source).bytes.weights == expected


def test_fixed_batch_size():
    model = keras.Sequential([keras.Input(batch_shape=(4, 10, 3)), layers.LSTM(5, stateful=True)])
    assert estimate(model).settings.batch_size == 4
    with pytest.raises(UsageError, match="fixes the batch at 4"):
        estimate(model, batch_size=8)


def test_layers_of_layers_and_subclassed_models():
    class Block(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.up, self.down = layers.Dense(16), layers.Dense(4)

        def build(self, shape):
            self.scale = self.add_weight(shape=(4,))
            self.up.build(shape)
            self.down.build((*shape[:-1], 16))

        def call(self, x):
            return x + self.down(self.up(x)) * self.scale

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Block(name=f"b{i}") for i in range(2)]
            self.unused = layers.Dense(3, name="unused")
            self.unused.build((None, 2))

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def build():
        net = Net()
        net.build((None, 7, 4))
        return net

    for source in (build, build()):
        report = estimate(source)
        by_name = rows(report)
        assert by_name[next(name for name in by_name if name.startswith("b0/"))].activation_elements == 7 * 16
        assert by_name["b0"].activation_elements == 7 * 4
        assert by_name["b0"].parameters == 4
        assert (by_name["unused"].uses, by_name["unused"].parameters) == (0, 9)
        assert report.model.parameters == 2 * (4 + 80 + 68) + 9


class Wide(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(40_000)

    def call(self, x):
        return self.dense(x)


def test_a_subclassed_model_needs_a_shape_and_an_object_is_not_built():
    with pytest.raises(UsageError, match="--input-shape"):
        estimate(Wide)
    assert estimate(Wide, input_shape=(20_000,)).model.parameters == 800_040_000
    net = Wide()
    assert estimate(net, input_shape=(20_000,)).model.parameters == 800_040_000
    assert not net.dense.built
    sequential = keras.Sequential([layers.Dense(3)])
    assert estimate(sequential, input_shape=(4,)).model.parameters == 15
    assert not sequential.built


def test_inputs_of_a_subclassed_model():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(10, 4)
            self.dense = layers.Dense(2)

        def call(self, inputs):
            if isinstance(inputs, dict):
                return self.dense(self.table(inputs["ids"])) * keras.ops.expand_dims(inputs["weight"], -1)
            return self.dense(keras.ops.take(self.table.embeddings, inputs, axis=0) if self.table.built else inputs)

    report = estimate(Net, input_shape=["ids=7:int32", "weight=7"])
    assert [(row.name, row.dtype) for row in report.layers[:2]] == [("ids", "int32"), ("weight", "float32")]
    assert report.layers[-1].activation_elements == 14
    built = Net()
    built(np.zeros((2, 3), "float32"))
    assert estimate(built).layers[0].output_shape == (None, 3)  # as it was built
    with pytest.raises(UsageError, match=r"must have a dtype .*got 'int33'"):
        estimate(Net, input_shape="7:int33")
    declared = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(UsageError, match="must have the dtype float32; got int32"):
        estimate(declared, input_shape="4:int32")


def test_a_batch_of_any_size():
    ids = keras.Input((1024,), dtype="int32")
    model = keras.Model(ids, layers.Embedding(10, 64)(ids))
    assert estimate(model, batch_size=3 * 10**9).bytes.activations == 2 * 3 * 10**9 * 1024 * 64 * 4


def test_call_with_several_arguments():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.left, self.right = layers.Dense(3), layers.Dense(3)

        def build(self, a_shape, b_shape):
            self.left.build(a_shape)
            self.right.build(b_shape)

        def call(self, a, b):
            return self.left(a) + self.right(b)

    assert estimate(Net, input_shape={"a": (4,), "b": (5,)}).model.parameters == 15 + 18
    built = Net()
    built(np.zeros((2, 4), "float32"), np.zeros((2, 5), "float32"))
    assert [row.name for row in estimate(built).layers[:2]] == ["a", "b"]


OPTIMIZERS = [
    lambda: keras.optimizers.SGD(),
    lambda: keras.optimizers.SGD(momentum=0.9),
    lambda: keras.optimizers.Adam(amsgrad=True),
    lambda: keras.optimizers.Adafactor(),
    lambda: keras.optimizers.Lion(use_ema=True),
    lambda: keras.optimizers.Lamb(),
    lambda: keras.optimizers.Muon(),
    lambda: keras.optimizers.RMSprop(centered=True, gradient_accumulation_steps=4),
    lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9)),
    lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
]


def test_an_optimizer_has_the_slots_that_the_real_one_has():
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(30)])
    for make in OPTIMIZERS:
        optimizer = make()
        model.compile(optimizer=optimizer)
        optimizer.build(model.trainable_variables)
        true = sum(math.prod(v.shape) * (8 if v.dtype == "int64" else 4) for v in optimizer.variables)
        assert estimate(model).unmodelled[0].bytes == true, optimizer
    assert estimate(model, optimizer="SGD").settings.optimizer == "sgd"


def test_output_of_data_dependent_size_is_unknown():
    class Pick(layers.Layer):
        def call(self, x):
            import tensorflow as tf

            return tf.boolean_mask(x, x > 0)

    inputs = keras.Input((4,))
    model = keras.Model(inputs, Pick(name="pick")(layers.Dense(4)(inputs)))
    report = estimate(model)
    assert rows(report)["pick"].activation_elements is None
    assert any("pick" in entry.what for entry in report.unmodelled)
    assert report.bytes.high is None
    assert estimate(model, device="1TB").device.verdict == "too close to call"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be .*got 0"),
        ({"replicas": 2.0}, "replicas must be a whole number .*got 2.0"),
        ({"method": "xlaa"}, "method must be 'auto', .*got 'xlaa'; did you mean 'xla'"),
        ({"mode": "fit"}, "mode must be .*got 'fit'"),
        ({"jit_compile": "yes"}, "jit_compile"),
        ({"optimizer": "adamm"}, "optimizer must be one of adadelta.*got 'adamm'"),
        ({"input_shape": (28, 28, 3)}, "such as 28,28,1, .*got 28,28,3"),
    ],
)
def test_wrong_arguments(mnist_cnn, options, message):
    with pytest.raises(UsageError, match=message):
        estimate(mnist_cnn, **options)


def test_json_has_the_fields_of_the_contract(mnist_cnn):
    data = estimate(mnist_cnn, device="16GB").to_dict()
    assert data["format_version"] == 1
    assert set(data["model"]) >= {"name", "source", "layers", "parameters", "trainable_parameters"}
    assert set(data["settings"]) >= {
        "batch_size", "optimizer", "loss", "dtype_policy", "mode", "method", "execution", "device",
    }  # fmt: skip
    assert set(data["bytes"]) >= {
        "total", "low", "high", "weights", "optimizer", "gradients", "activations", "inputs", "workspace", "allocator",
    }  # fmt: skip
    assert set(data["layers"][0]) >= {
        "name", "class", "output_shape", "parameters", "activation_elements", "bytes_at_peak",
    }  # fmt: skip
    assert data["layers"][1]["output_shape"] == [None, 24, 24, 32]
    assert set(data["device"]) >= {"name", "memory_bytes", "available_bytes", "verdict"}
    assert data["settings"]["execution"] == "none"
    sizes = [value for value in data["bytes"].values() if value is not None]
    assert all(isinstance(value, int) for value in sizes)


@pytest.mark.parametrize("is_on", [True, False])
def test_estimate_restores_the_garbage_collector(mnist_cnn, is_on):
    was_on = gc.isenabled()
    try:
        gc.enable() if is_on else gc.disable()
        estimate(mnist_cnn)
        with pytest.raises(UsageError):
            estimate(mnist_cnn, input_shape=(1, 2))
        assert gc.isenabled() is is_on
    finally:
        gc.enable() if was_on else gc.disable()
