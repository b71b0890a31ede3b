"""Files written by Keras 2, made here with the real one (`tf_keras`)."""

from __future__ import annotations

import json

import pytest

from kerasmem.errors import ModelFileError, UntrustedModelError, UsageError
from kerasmem.estimation import estimating
from kerasmem.models.keras2 import is_keras2


def estimate(source, **options):
    """Estimate by the formula unless a test says otherwise: most here are about shapes."""
    return estimating.estimate(source, **{"method": "formula", **options})


tf_keras = pytest.importorskip("tf_keras")
tf = pytest.importorskip("tensorflow")
layers = tf_keras.layers


def saved(model, path):
    model.save(path)
    return path


def check(model, path, **options):
    """The estimate of a saved Keras 2 model has its parameters and its layers' output sizes."""
    report = estimate(saved(model, path), batch_size=8, **options)
    assert report.model.parameters == model.count_params()
    return report


def test_mnist_cnn(tmp_path):
    convolutions = [layers.Conv2D(32, 5), layers.MaxPooling2D(), layers.Conv2D(64, 5), layers.MaxPooling2D()]
    dense = [layers.Flatten(), layers.Dropout(0.5), layers.Dense(1024, "relu"), layers.Dense(10)]
    model = tf_keras.Sequential([layers.Input((28, 28, 1)), *convolutions, *dense])
    model.compile(optimizer=tf_keras.optimizers.RMSprop(1e-4), loss="mse")
    for name in ("m.h5", "m.keras"):
        report = check(model, tmp_path / name)
        assert report.formula.parameter_bytes == 8_895_568
        assert report.formula.activation_bytes_per_sample == 239_824
        assert (report.settings.optimizer, report.settings.loss) == ("rmsprop", "mse")
        assert report.notes == ()
    (tmp_path / "m.json").write_text(model.to_json())
    assert estimate(tmp_path / "m.json").formula.activation_elements_per_sample == 29_978


@pytest.mark.parametrize(
    "name",
    [
        "MobileNetV2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ResNet50", "DenseNet121")),
    ],
)  # fmt: skip
def test_applications_agree_layer_by_layer_with_the_original(tmp_path, name):
    """Arguments that Keras 3 lost."""
    model = getattr(tf_keras.applications, name)(weights=None, input_shape=(64, 64, 3))
    report = check(model, tmp_path / "m.h5")
    ours = {row.name: row.output_shape for row in report.layers}
    alone = [layer for layer in model.layers if not isinstance(layer, tf_keras.Model)]
    assert len(alone) > 0.9 * len(model.layers) and alone[-1] is model.layers[-1]
    for layer in alone:
        shape = layer.output_shape[0] if isinstance(layer.output_shape, list) else layer.output_shape
        assert ours[layer.name.replace("/", "_")] == shape


def test_a_tensorflow_function_between_layers_is_refused(tmp_path):
    a = layers.Input((4,))
    with pytest.raises(ModelFileError, match=r"TFOpLambda.*--factory"):
        estimate(saved(tf_keras.Model(a, tf.nn.relu(a)), tmp_path / "m.h5"))


def test_recurrent_attention_masks_and_open_lengths(tmp_path):
    ids = layers.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(100, 16, mask_zero=True)(ids)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    x = layers.MultiHeadAttention(2, 8)(x, x)
    x = layers.TimeDistributed(layers.Dense(4))(layers.LayerNormalization()(x))
    x = layers.GRU(5)(x)
    report = check(tf_keras.Model(ids, layers.Dense(1)(x)), tmp_path / "m.h5", input_shape={"ids": (12,)})
    assert (None, 12, 16) in [row.output_shape for row in report.layers]


def test_the_usual_transfer_learning_model(tmp_path):
    base = tf_keras.applications.MobileNetV2(weights=None, include_top=False, input_shape=(32, 32, 3))
    base.trainable = False
    model = tf_keras.Sequential([base, layers.GlobalAveragePooling2D(), layers.Dense(2)])
    assert check(model, tmp_path / "m.h5").model.trainable_parameters == 1280 * 2 + 2


def test_sequence_to_sequence_with_states(tmp_path):
    encoder_in, decoder_in = layers.Input((7, 3), name="e"), layers.Input((5, 2), name="d")
    _, h, c = layers.LSTM(4, return_state=True)(encoder_in)
    decoded = layers.LSTM(4, return_sequences=True)(decoder_in, initial_state=[h, c])
    decoded = layers.GRU(4, return_sequences=True)(decoded, initial_state=h)
    report = check(tf_keras.Model([encoder_in, decoder_in], layers.Dense(6)(decoded)), tmp_path / "m.h5")
    assert report.layers[-1].output_shape == (None, 5, 6)


def test_classes_that_keras_3_keeps_out_of_sight(tmp_path):
    a = layers.Input((16, 16, 3))
    x = layers.ThresholdedReLU()(layers.BatchNormalization(name="a/slash")(a))
    for name in ("m.h5", "m.keras"):
        check(tf_keras.Model(a, x), tmp_path / name)


def test_nested_and_shared_models(tmp_path):
    inside = tf_keras.Sequential([layers.Input((8,)), layers.Dense(4)], name="inside")
    image = layers.Input((8,))
    functional = tf_keras.Model(image, layers.Dense(4)(image), name="tower")
    a, b = layers.Input((8,), name="a"), layers.Input((8,), name="b")
    merged = layers.Concatenate()([functional(a), functional(b), inside(a)])
    outer = tf_keras.Model([a, b], [layers.Dense(2)(merged), inside(b)])
    report = check(outer, tmp_path / "m.h5")
    uses = {row.name: row.uses for row in report.layers}
    assert [count for name, count in uses.items() if name.startswith(("tower/", "inside/"))] == [2, 2]


def test_mixed_precision(tmp_path):
    with_policy = tf_keras.mixed_precision.Policy("mixed_float16")
    model = tf_keras.Sequential([layers.Input((8,)), layers.Dense(4, dtype=with_policy), layers.Dense(2)])
    report = check(model, tmp_path / "m.h5")
    assert [row.dtype for row in report.layers] == ["float32", "float16", "float32"]


def test_a_lambda_does_not_run(tmp_path):
    model = tf_keras.Sequential([layers.Input((4,)), layers.Lambda(lambda x: x * 2, name="double"), layers.Dense(2)])
    with pytest.raises(UntrustedModelError, match=r"'double'.*--trust \("):
        estimate(saved(model, tmp_path / "m.h5"))
    assert estimate(tmp_path / "m.h5", trust=True).model.parameters == 10


def test_a_live_keras_2_model_is_refused():
    with pytest.raises(UsageError, match=r"a Keras 3 model; got tf_keras\."):
        estimate(tf_keras.Sequential([layers.Input((4,)), layers.Dense(2)]))


def test_what_keras_3_no_longer_has_is_named(tmp_path):
    model = tf_keras.Sequential([layers.Input((4, 3)), layers.LSTM(2, time_major=True, name="old")])
    with pytest.raises(ModelFileError, match=r"'old' \(LSTM\) uses time_major=True"):
        estimate(saved(model, tmp_path / "m.h5"))


def test_sequential_as_a_bare_list_of_layers(tmp_path):
    """As Keras 1 and the first Keras 2 wrote it."""
    dense = {"class_name": "Dense", "config": {"name": "d", "units": 3, "batch_input_shape": [None, 5]}}
    config = {"class_name": "Sequential", "config": [dense], "keras_version": "2.1.6", "backend": "tensorflow"}
    (tmp_path / "m.json").write_text(json.dumps(config))
    assert estimate(tmp_path / "m.json").model.parameters == 18


def test_told_apart_without_a_version():
    old = {"class_name": "Sequential", "config": {"layers": [{"config": {"batch_input_shape": [None, 2]}}]}}
    assert is_keras2(None, old)
    assert not is_keras2("3.1.0", old)
    assert not is_keras2(None, {"class_name": "Sequential", "config": {"layers": []}})


def test_a_gru_that_does_not_say_so_has_one_bias(tmp_path):
    def described(layer, **config):
        config = {"name": "gru", "units": 4, "batch_input_shape": [None, 5, 3], **config}
        layers = [{"class_name": layer, "config": config}]
        (tmp_path / "m.json").write_text(
            json.dumps({"class_name": "Sequential", "keras_version": "2.1.6", "config": layers})
        )
        return estimate(tmp_path / "m.json").model.parameters

    assert described("GRU") == 3 * 4 * (3 + 4 + 1)
    assert described("GRU", reset_after=True) == 3 * 4 * (3 + 4 + 2)


def test_a_function_that_the_user_gave_for_a_lambda(tmp_path):
    layers = [
        {"class_name": "Dense", "config": {"name": "d", "units": 3, "batch_input_shape": [None, 4]}},
        {"class_name": "Lambda", "config": {"name": "l", "function": "<lambda>", "function_type": "function"}},
    ]
    (tmp_path / "m.json").write_text(
        json.dumps({"class_name": "Sequential", "keras_version": "2.4.0", "config": {"name": "s", "layers": layers}})
    )
    report = estimate(tmp_path / "m.json", custom_objects={"<lambda>": lambda x: x[:, :2]})
    assert report.layers[-1].output_shape == (None, 2)
    with pytest.raises(ModelFileError, match="function <lambda>"):
        estimate(tmp_path / "m.json")
