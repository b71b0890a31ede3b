"""A model crosses into another process, or the user is told what to do."""

from __future__ import annotations

import functools
import json
import os
import sys
import textwrap
from dataclasses import replace

import keras
import pytest

from kerasmem.errors import UsageError
from kerasmem.models.spec import StepSpec, load_references, reference


def through_json(spec):
    return StepSpec.from_dict(json.loads(json.dumps(spec.to_dict())))


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A module of the user's."""
    name = "users_zoo"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        import keras

        class Twice(keras.layers.Layer):
            def call(self, x):
                return 2 * x

        @keras.saving.register_keras_serializable("zoo")
        class Registered(Twice):
            pass

        def own_loss(y, p):
            return keras.ops.mean(keras.ops.square(y - p))

        def build(width=4):
            return keras.Sequential([keras.Input((8,)), keras.layers.Dense(width), Twice(), Registered()])

        class Maker:
            @staticmethod
            def make():
                return build()
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(name)
    sys.modules.pop(name, None)


def test_a_path_is_passed_on_with_all_settings():
    spec = StepSpec(
        "some.keras", dtype_policy="mixed_float16", input_shape={"a": (2, 3), "b": "4:int32"}, optimizer="sgd",
        loss="mse", batch_size=7, mode="inference", jit_compile=True, trust=True, factory="m:f",
        factory_args={"depth": 3},
    )  # fmt: skip
    with spec.portable() as portable:
        again = through_json(portable)
    assert replace(again, paths=portable.paths) == portable
    assert (again.model, again.batch_size, again.mode) == ("some.keras", 7, "inference")
    assert again.input_shape == ["a=2,3", "b=4:int32"]
    assert {name: shape.sizes for name, shape in again.input_shapes().items()} == {"a": (2, 3), "b": (4,)}
    assert again.input_shapes()["b"].dtype == "int32"
    assert again.paths == (os.getcwd(),)


@pytest.mark.parametrize("named", [False, True])
def test_the_folder_is_looked_into_where_code_is_named_only(tmp_path, monkeypatch, named):
    path = str(tmp_path / "m.keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).save(path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    objects = {"Dense": keras.layers.Dense} if named else None
    with StepSpec(path, custom_objects=objects).portable() as spec, through_json(spec).opened():
        assert (str(tmp_path) in sys.path) is named


def test_a_live_model_is_opened_again_with_its_training(mnist_cnn):
    with StepSpec(mnist_cnn).portable() as spec:
        with through_json(spec).opened() as opened:
            assert opened.model is not mnist_cnn
            assert opened.model.count_params() == mnist_cnn.count_params()
            assert (opened.training.optimizer, opened.training.loss) == ("adam", "sparse_categorical_crossentropy")
        assert os.path.exists(spec.model)
        assert os.path.getsize(spec.model) < 50_000  # no weights
    assert not os.path.exists(spec.model)


def test_classes_of_a_module_cross(zoo):
    model = zoo.build()
    model.compile(loss=zoo.own_loss)
    with StepSpec(model).portable() as spec:
        assert spec.custom_objects["Twice"] == "users_zoo:Twice"
        assert spec.custom_objects["zoo>Registered"] == "users_zoo:Registered"
        assert spec.custom_objects["own_loss"] == "users_zoo:own_loss"
        with through_json(spec).opened() as opened:
            assert [type(layer).__name__ for layer in opened.model.layers] == ["Dense", "Twice", "Registered"]


def test_functions_of_a_module_cross(zoo):
    for build in (zoo.build, "users_zoo:build"):
        spec = StepSpec(build, factory_args={"width": 6})
        with spec.portable() as spec, through_json(spec).opened() as opened:
            assert spec.model == "users_zoo:build"
            assert opened.model.layers[0].units == 6
    bound = StepSpec(functools.partial(zoo.build, width=9))
    with bound.portable() as spec, through_json(spec).opened() as opened:
        assert opened.model.layers[0].units == 9


def test_a_function_of_a_file_is_named_by_the_file(tmp_path):
    from kerasmem.models.vocabulary import import_user_module

    path = tmp_path / "by_file.py"
    path.write_text(
        "import keras\ndef build():\n    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])\n"
    )
    with StepSpec(import_user_module(str(path), "model").build).portable() as spec:
        assert spec.model == f"{path}:build"


def test_what_cannot_cross_is_refused_with_the_way_out(zoo, monkeypatch):
    class Local(keras.layers.Layer):
        def call(self, x):
            return x

    here = keras.Sequential([keras.Input((3,)), Local()])
    inside = type("Inside", (keras.layers.Layer,), {"__module__": "__main__", "call": lambda self, x: x})
    script = keras.Sequential([keras.Input((3,)), inside()])
    for model, match in (
        (here, "Local.* cannot be imported by another process"),
        (script, "__main__.Inside.* cannot be imported"),
        (lambda: None, "<lambda>.* cannot be imported by another process"),
        (zoo.Maker.make, "inside a class"),
        (functools.partial(zoo.build, 3), "by keyword"),
    ):
        with pytest.raises(UsageError, match=match) as caught, StepSpec(model).portable():
            pass
        assert "module:function" in str(caught.value)
    with (
        pytest.raises(UsageError, match=r"width .* cannot be given .* type object is not"),
        StepSpec(zoo.build, factory_args={"width": object()}).portable(),
    ):
        pass
    with pytest.raises(UsageError, match=r"builtins\.int is no model"), StepSpec(3).portable():
        pass
    with (
        pytest.raises(UsageError, match=r"Local.* cannot be imported by another process"),
        StepSpec("a.h5", custom_objects={"Local": Local}).portable(),
    ):
        pass


def test_a_function_under_another_name_is_refused(zoo, monkeypatch):
    original = zoo.build
    monkeypatch.setattr(zoo, "build", lambda: None)
    with pytest.raises(UsageError, match="stands under another name"):
        reference(original, "it")


def test_references_name_what_is_missing():
    assert load_references({"Dense": "keras.layers:Dense"})["Dense"] is keras.layers.Dense
    with pytest.raises(UsageError, match="has no 'Nothing'"):
        load_references({"x": "keras.layers:Nothing"})
