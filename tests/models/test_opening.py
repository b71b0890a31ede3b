"""Opening models: what runs, what is refused, and what is never allocated."""

from __future__ import annotations

import base64
import json
import marshal
import random
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

from kerasmem.cli.options import parse_factory_args
from kerasmem.errors import ModelError, ModelFileError, UnknownLayerError, UntrustedModelError, UsageError
from kerasmem.estimation import estimating
from kerasmem.models.spec import StepSpec
from kerasmem.models.user_code import import_user_module, load_custom_objects
from kerasmem.models.weightless import weightless

layers = keras.layers


def estimate(source, **options):
    """Estimate by the formula unless a test says otherwise: most here are about shapes."""
    return estimating.estimate(source, **{"method": "formula", **options})


def write_config(path, *configs, **more):
    """An architecture file of a Sequential made of the given layer configurations."""
    shape = {"module": "keras.layers", "class_name": "InputLayer", "config": {"batch_shape": [None, 4], "name": "in"}}
    model = {
        "module": "keras",
        "class_name": "Sequential",
        "config": {"name": "model", "layers": [shape, *configs]},
        "registered_name": None,
        **more,
    }
    path.write_text(json.dumps(model))
    return path


def evil_lambda(tmp_path):
    """A lambda whose code writes a file when it is called."""
    target = tmp_path / "pwned"
    function = eval(f"lambda x: (open({str(target)!r}, 'w').close(), x)[1]")
    code = base64.b64encode(marshal.dumps(function.__code__)).decode()
    return target, {"class_name": "__lambda__", "config": {"code": code, "defaults": None, "closure": None}}


def test_weights_are_never_allocated_and_nothing_is_left_behind():
    with weightless():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        assert all(weight._value is None for weight in model.weights)
    keras.Sequential([keras.Input((4,)), layers.Dense(3)])  # a later scope must not initialise the first model
    with keras.StatelessScope():
        pass
    assert all(weight._value is None for weight in model.weights)


def test_the_given_model_is_left_as_it_was(mnist_cnn):
    before = [weight.numpy() for weight in mnist_cnn.weights]
    nodes = [len(layer._inbound_nodes) for layer in mnist_cnn.layers]
    estimate(mnist_cnn, dtype_policy="mixed_float16")
    estimate(mnist_cnn)
    assert nodes == [len(layer._inbound_nodes) for layer in mnist_cnn.layers]
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, mnist_cnn.weights, strict=True))
    assert keras.config.dtype_policy().name == "float32"


def test_lambda_in_a_json_does_not_run(tmp_path):
    target, function = evil_lambda(tmp_path)
    config = {"name": "sneaky", "function": function, "output_shape": [4]}
    path = write_config(
        tmp_path / "m.json",
        {"module": "keras.layers", "class_name": "Lambda", "config": config, "registered_name": None},
    )
    with pytest.raises(UntrustedModelError, match=r"'sneaky' is a Lambda.*--trust \("):
        estimate(path)
    assert not target.exists()
    assert estimate(path, trust=True).layers[-1].activation_elements == 4
    assert target.exists()  # so the code is real, and only trust lets it run


def test_lambda_saved_by_keras(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2, output_shape=(4,)), layers.Dense(2)])
    for name in ("m.keras", "m.h5"):
        model.save(tmp_path / name)
        with pytest.raises(UntrustedModelError, match=r"--trust \("):
            estimate(tmp_path / name)
        assert estimate(tmp_path / name, trust=True).model.parameters == 10


def layer_config(class_name, config, module="keras.layers"):
    return {"module": module, "class_name": class_name, "config": {"name": "x", **config}, "registered_name": None}


def function_config(name, module):
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


@pytest.mark.parametrize(
    ("config", "error"),
    [
        # functions and classes of Keras and of Python that are no building blocks of a model
        (layer_config("get_file", {"origin": "file:///etc/passwd"}, "keras.utils"), UnknownLayerError),
        (layer_config("Popen", {"args": ["touch", "pwned"]}, "subprocess"), UnknownLayerError),
        (layer_config("load_model", {"filepath": "x"}, "keras.models"), UntrustedModelError),
        (layer_config("import_module", {}, "importlib"), UnknownLayerError),
        (layer_config("Dense", {"units": 2}, "os"), UnknownLayerError),
        # layers that read other files
        (layer_config("StringLookup", {"vocabulary": "/etc/passwd"}), UntrustedModelError),
        (layer_config("TextVectorization", {"vocabulary": "/etc/passwd"}), UntrustedModelError),
        (layer_config("TFSMLayer", {"filepath": "/tmp/saved"}), UntrustedModelError),
        (layer_config("TorchModuleWrapper", {"module": "UEs="}), UntrustedModelError),
        # functions where a layer takes one
        (layer_config("Dense", {"units": 2, "activation": function_config("system", "os")}), UnknownLayerError),
        # a path in the clothes of something that an older format wrote
        (
            layer_config("StringLookup", {"vocabulary": {"class_name": "Policy", "config": {"name": "/etc/passwd"}}}),
            ModelFileError,
        ),
        # configurations that only look like one
        (layer_config("Dense", {"units": "many"}), ModelFileError),
        (layer_config("Dense", {"units": 2, "no_such_argument": 1}), ModelFileError),
        (layer_config("Adam", {}, "keras.optimizers"), ModelFileError),
        ({"class_name": "Dense", "config": None}, ModelFileError),
        ({"class_name": ["Dense"], "config": {}}, ModelFileError),
        (17, ModelFileError),
    ],
)
@pytest.mark.parametrize("version", ["3.15.0", "2.11.0"])
def test_hostile_configurations(tmp_path, monkeypatch, config, error, version):
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path / "m.json", config, keras_version=version)
    if version < "3" and "no_such_argument" in json.dumps(config):
        return  # an argument that Keras 3 lost, as far as one can tell
    with pytest.raises(error) as caught:
        estimate(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2
    assert [each.name for each in tmp_path.iterdir()] == ["m.json"]


def test_keras_switched_to_unsafe_changes_nothing(tmp_path, monkeypatch):
    """The same file is refused where the user's process has allowed unsafe files for another purpose."""
    policy = {"class_name": "Policy", "config": {"name": str(tmp_path / "secret")}}
    (tmp_path / "secret").write_text("word\n")
    config = layer_config("StringLookup", {"vocabulary": policy})
    path = write_config(tmp_path / "m.json", config, keras_version="2.11.0")
    keras.config.enable_unsafe_deserialization()
    try:
        with pytest.raises(UntrustedModelError, match="reads the file"):
            estimate(path)
    finally:
        keras.src.saving.serialization_lib.global_state.set_global_attribute("safe_mode_saving", None)


def test_calls_without_a_tensor_are_not_computed(tmp_path):
    image = keras.Input((4,), name="image")
    config = json.loads(keras.Model(image, keras.ops.tile(image, (1, 2))).to_json())
    (tile,) = [layer for layer in config["config"]["layers"] if layer["class_name"] == "Tile"]
    tile["inbound_nodes"] = [{"args": [[[0.0]]], "kwargs": {}}]
    tile["config"]["repeats"] = [200_000, 200_000]
    (tmp_path / "m.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="is called without a tensor"):
        estimate(tmp_path / "m.json")


def test_unrolled_layers_stay_unrolled(tmp_path):
    model = keras.Sequential([keras.Input((50, 2)), layers.LSTM(3, unroll=True), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.save(tmp_path / "m.keras")
    assert estimate(tmp_path / "m.keras", method="graph").peak == pytest.approx(
        estimate(model, method="graph").peak, rel=0.02
    )


def test_layers_that_unroll_millions_of_steps_are_refused(tmp_path):
    config = keras.Sequential([keras.Input((50, 2)), layers.LSTM(3, unroll=True)]).to_json()
    (tmp_path / "m.json").write_text(config.replace("[null, 50, 2]", "[null, 3000000, 2]"))
    with pytest.raises(ModelFileError, match="unrolls 3,000,000 steps"):
        estimate(tmp_path / "m.json")


def test_unknown_classes_are_all_named(tmp_path):
    first = layer_config("SwinBlock", {}, "mymodels")
    second = {"class_name": "mymodels>WindowAttention", "config": {}, "registered_name": "mymodels>WindowAttention"}
    path = write_config(tmp_path / "m.json", first, second)
    with pytest.raises(UnknownLayerError, match=r"SwinBlock, mymodels>WindowAttention.*--custom-objects.*--factory"):
        estimate(path)


def test_custom_objects_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "mylayers.py").write_text(
        textwrap.dedent(
            """
            import keras

            @keras.saving.register_keras_serializable("mine")
            class Scale(keras.layers.Layer):
                def build(self, shape):
                    self.scale = self.add_weight(shape=(shape[-1],))
                def call(self, x):
                    return swoosh(x * self.scale)

            def swoosh(x):
                return x * keras.ops.sigmoid(x)
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    objects = load_custom_objects(["mylayers"])
    model = keras.Sequential([keras.Input((4,)), objects["Scale"](), layers.Dense(2, activation=objects["swoosh"])])
    for name in ("m.keras", "m.h5"):
        model.save(tmp_path / name)
        assert estimate(tmp_path / name, custom_objects=objects).model.parameters == 4 + 10
    with pytest.raises(UsageError, match="no_such_module"):
        load_custom_objects(["no_such_module"])


def test_factories(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(
        "import keras\n"
        "def build(): return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])\n"
        "def broken(): raise RuntimeError('no luck')\n"
        "def nothing(): return 3\n"
        "def ending(): raise SystemExit(0)\n"
        "value = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert estimate("nets:build").model.parameters == 15
    assert estimate(f"{tmp_path}/nets.py:build").model.source == f"{tmp_path}/nets.py:build"
    assert estimate(None, factory="nets:build").model.parameters == 15
    keras.Sequential([keras.Input((4,)), layers.Dense(3)]).save_weights("w.weights.h5")
    report = estimate("w.weights.h5", factory="nets:build")
    assert report.model.parameters == 15
    assert "w.weights.h5" in report.model.source
    for name, error, message in [
        ("nets:broken", ModelError, "no luck"),
        ("nets:nothing", ModelError, "must return .*got int"),
        ("nets:ending", ModelError, "SystemExit: 0"),
        ("nets:value", UsageError, "no function 'value'"),
        ("nets:absent", UsageError, "no function 'absent'"),
        ("absent.module:build", UsageError, "cannot be imported"),
    ]:
        with pytest.raises(error, match=message):
            estimate(name)
    with pytest.raises(ModelFileError, match="the file does not exist"):
        estimate("absent.weights.h5", factory="nets:build")


def test_a_factory_may_load_clone_and_build_an_optimizer(tmp_path, mnist_cnn):
    mnist_cnn.save(tmp_path / "m.keras")

    def optimizer_built():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    assert estimate(lambda: keras.models.load_model(tmp_path / "m.keras")).model.parameters == 1_111_946
    assert estimate(lambda: keras.models.clone_model(mnist_cnn)).model.parameters == 1_111_946
    report = estimate(optimizer_built)
    assert (report.settings.optimizer, report.unmodelled[0].bytes) == ("adam", 15 * 2 * 4 + 12)


def test_a_factory_names_its_layers_as_in_a_new_process():
    old = layers.Dense(2)

    def build(first):
        return keras.Sequential([keras.Input((4,)), first, *(layers.Dense(2) for _ in range(2))])

    names = [row.name for row in estimate(lambda: build(layers.Dense(2))).layers]
    assert names == ["input_layer", "dense", "dense_1", "dense_2"]
    old.name = "dense_1"
    assert estimate(lambda: build(old)).model.parameters == 10 + 6 + 6


def test_a_factory_that_raises_value_error_runs_once():
    calls = []

    def build():
        calls.append(None)
        raise ValueError("width must be positive")

    with pytest.raises(ModelError, match="width must be positive"):
        estimate(build)
    assert len(calls) == 1


def test_a_file_named_like_a_module_does_not_replace_it(tmp_path):
    (tmp_path / "random.py").write_text("def build(): return 4\n")
    assert import_user_module(f"{tmp_path}/random.py", "model")["build"]() == 4
    assert sys.modules["random"] is random


@pytest.mark.parametrize(("options", "weights"), [({}, 2), ({"mean": 1.0, "variance": 2.0}, 0)])
def test_a_large_normalization_takes_no_memory(tmp_path, options, weights):
    """Its mean and variance are constants of the graph, each as large as the input."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(layers.Normalization(**options)(inputs)))
    (tmp_path / "small.json").write_text(model.to_json())
    (tmp_path / "m.json").write_text(model.to_json().replace("[null, 4]", f"[null, {10**8}]"))
    program = textwrap.dedent(
        f"""
        import resource, kerasmem
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kerasmem.estimate({str(tmp_path / "small.json")!r})
        before = peak()
        print(kerasmem.estimate({str(tmp_path / "m.json")!r}, batch_size=1).model.parameters, peak() - before)
        """
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    parameters, kib = map(int, output.split())
    assert parameters == (1 + weights) * 10**8 + 1 + weights // 2
    assert kib < 300 * 2**10


def test_factory_arguments(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(
        "import keras\n"
        "def stack(depth, width=3):\n"
        "    return keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(width) for _ in range(depth))])\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = parse_factory_args(["depth=2", "width=5"])
    assert estimate("nets.py:stack", factory_args=arguments).model.parameters == 25 + 30
    assert parse_factory_args(["a=true", "b=[1, 2]", "c=relu", "d=x=y"]) == {
        "a": True, "b": [1, 2], "c": "relu", "d": "x=y",
    }  # fmt: skip
    with pytest.raises(ModelError, match="unexpected keyword argument 'deep'"):
        estimate("nets.py:stack", factory_args={"deep": 1})
    with pytest.raises(UsageError, match="must be NAME=VALUE"):
        parse_factory_args(["depth"])


def test_applications_of_keras_load_no_weights(monkeypatch):
    monkeypatch.setattr(keras.utils, "get_file", lambda *a, **k: pytest.fail("weights were asked for"))
    assert estimate("keras.applications:MobileNetV2").model.parameters == 3_538_984


@pytest.mark.parametrize("source", [[1, 2], 3, None, {"model": 1}, layers.Dense(3)])
def test_things_that_are_no_models(source):
    with pytest.raises(UsageError, match="model must be"):
        estimate(source)


def test_dtype_policy_reaches_layers_and_spares_inputs(tmp_path, mnist_cnn):
    mnist_cnn.save(tmp_path / "m.keras")
    for source in (mnist_cnn, tmp_path / "m.keras"):
        report = estimate(source, dtype_policy="mixed_float16")
        assert report.settings.dtype_policy == "mixed_float16"
        assert [row.dtype for row in report.layers] == ["float32"] + ["float16"] * 8
        assert report.bytes.weights == 4 * report.model.parameters  # variables stay float32
    with pytest.raises(UsageError, match="float99"):
        estimate(mnist_cnn, dtype_policy="float99")


def test_the_module_path_is_as_before(tmp_path, monkeypatch):
    (tmp_path / "helper_of_net.py").write_text("WIDTH = 3")
    (tmp_path / "net_with_helper.py").write_text(
        "import keras\ndef build():\n    from helper_of_net import WIDTH\n"
        "    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(WIDTH)])\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with StepSpec("net_with_helper:build").open_model() as opened:
        assert opened.model.output_shape == (None, 3)
    assert sys.path == before
