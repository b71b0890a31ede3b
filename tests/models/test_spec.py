"""A model crosses into another process, or the user is told what to do."""

from __future__ import annotations

import pickle
import sys
import textwrap

import cloudpickle
import keras
import pytest

from kerasmem.errors import UsageError
from kerasmem.models.spec import StepSpec


def sent(spec):
    """Send a step as to another process."""
    return pickle.loads(cloudpickle.dumps(spec))


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
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(name)
    sys.modules.pop(name, None)


def test_a_live_model_is_opened_again_with_its_training(mnist_cnn):
    spec = StepSpec(mnist_cnn, batch_size=7).portable(mode="evaluate")
    assert len(cloudpickle.dumps(spec)) < 50_000  # no weights
    assert (spec.batch_size, spec.mode) == (7, "evaluate")
    with sent(spec).open_model() as opened:
        assert opened.model is not mnist_cnn
        assert opened.model.count_params() == mnist_cnn.count_params()
        assert type(opened.model.optimizer).__name__ == "Adam"
        assert opened.model.loss == "sparse_categorical_crossentropy"


def test_classes_of_a_module_cross(zoo):
    model = zoo.build()
    model.compile(loss=zoo.own_loss)
    spec = StepSpec(model).portable()
    assert {"Twice", "zoo>Registered"} <= set(spec.model.objects)
    with sent(spec).open_model() as opened:
        assert [type(layer).__name__ for layer in opened.model.layers] == ["Dense", "Twice", "Registered"]
        assert opened.model.loss.__name__ == "own_loss"


def test_classes_and_functions_of_a_script_cross():
    class Local(keras.layers.Layer):
        def call(self, x):
            return x

    here = keras.Sequential([keras.Input((3,)), Local()])
    here.compile("sgd", [lambda y, p: keras.ops.mean(y - p)], metrics=["mae", keras.metrics.Mean()])
    for model in (here, lambda: keras.Sequential([keras.Input((3,)), Local()])):
        with sent(StepSpec(model).portable()).open_model() as opened:
            assert type(opened.model.layers[0]).__name__ == "Local"
    with sent(StepSpec(here).portable()).open_model() as opened:
        assert opened.model.loss[0](1.0, 0.5) == 0.5
    assert not StepSpec(keras.Sequential([keras.Input((3,)), Local()])).portable().model.compiled


def test_a_model_without_a_configuration_is_refused():
    class Wide(keras.layers.Layer):
        def __init__(self, width):
            super().__init__()
            self.width = width

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((3,)), Wide(object())])
    with pytest.raises(UsageError, match=r"cannot be rebuilt.*pass a function"):
        StepSpec(model).portable()


def test_no_model_is_refused():
    with pytest.raises(UsageError, match=r"model must be .*got builtins\.int"), StepSpec(3).portable().open_model():
        pass
