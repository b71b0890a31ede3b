"""Models inside a model are cut too: transfer learning, whose backbone is one layer of the model."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import kerasmem
from kerasmem.training.recompute.planning import KeptTensor, LayerCall, plan_segments
from kerasmem.training.recompute.tracing import trace_chain

pytestmark = pytest.mark.usefixtures("loaded_python")


def stack(depth=12, units=256):
    inputs = keras.Input((units,))
    layers = [keras.layers.Dense(units, activation="gelu", name=f"dense_{number}") for number in range(depth)]
    backbone = keras.Sequential([keras.Input((units,)), *layers], name="backbone")
    x = keras.layers.Rescaling(2.0, name="scale")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(backbone(x)), name="transfer")


def test_the_backbone_is_cut_inside_and_takes_less_as_measured():
    plain = stack()
    plain.compile("sgd", "mse", jit_compile=False)
    model = kerasmem.recompute(plain, batch_size=4096)
    assert sum(cut.startswith("backbone/dense_") for cut in model.cuts) >= 2, model.cuts
    assert model.plan.activation_bytes < 0.5 * model.plan.plain_activation_bytes
    one, other = (kerasmem.measure(each, batch_size=4096, steps=3).bytes for each in (plain, model))
    assert other.total < 0.6 * one.total
    assert other.total == pytest.approx(model.plan.predicted_bytes, rel=0.3)


def test_it_loads_where_kerasmem_is_not_installed(program, tmp_path):
    """Cut inside its backbone, and with a backbone that was cut before it came into the model."""
    outer = kerasmem.recompute(stack(4, 8), cuts=["backbone/dense_1"])
    inputs = keras.Input((8,))
    backbone = kerasmem.recompute(stack(4, 8), segments=2)
    inner = keras.Model(inputs, keras.layers.Dense(1, name="head")(backbone(inputs)))
    x = np.linspace(0, 1, 24).reshape(3, 8).astype("float32")
    paths = []
    for number, model in enumerate((outer, inner)):
        model.compile("adam", "mse", jit_compile=False)
        model.fit(x, x[:, :1], verbose=0)
        model.save(tmp_path / f"{number}.keras")
        np.save(tmp_path / f"{number}.npy", model.predict(x, verbose=0))
        paths.append(str(tmp_path / f"{number}"))
    code = (
        "import sys; sys.modules['kerasmem'] = None; import keras, numpy as np\n"
        "x = np.linspace(0, 1, 24).reshape(3, 8).astype('float32')\n"
        "for path in sys.argv[1:]:\n"
        "    model = keras.saving.load_model(path + '.keras')\n"
        "    np.testing.assert_allclose(model.predict(x, verbose=0), np.load(path + '.npy'), rtol=1e-6)\n"
        "    model.fit(x, x[:, :1], verbose=0); print(int(model.optimizer.iterations))\n"
    )
    done = program("-c", code, *paths)
    assert done.out.split() == ["2", "2"], done.err


def test_frozen_layers_keep_nothing_and_one_warning_says_that_nothing_is_saved():
    model = stack(4, 64)
    kept = sum(each.bytes for step in trace_chain(model, 32) for each in step.kept_tensors if each.for_gradient)
    model.get_layer("backbone").trainable = False
    frozen = sum(each.bytes for step in trace_chain(model, 32) for each in step.kept_tensors if each.for_gradient)
    assert frozen < 0.3 * kept
    with pytest.warns(UserWarning, match=r"saves nothing in model 'transfer'.*Frozen layers keep nothing") as caught:
        kerasmem.recompute(model)
    assert [warning.filename for warning in caught] == [__file__]


def test_what_is_called_twice_is_left_whole_and_said():
    twin = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(8)], name="twin")
    one, two = keras.Input((8,), name="one"), keras.Input((8,), name="two")
    model = keras.Model([one, two], keras.layers.Subtract(name="less")([twin(one), twin(two)]), name="siamese")
    assert [each.name for each in trace_chain(model, 4)] == ["twin", "twin", "less"]
    with pytest.warns(UserWarning, match=r"saves nothing in model 'siamese'.*called more than once"):
        assert kerasmem.recompute(model).cuts == ()


def test_no_segment_lies_half_in_a_nested_model():
    names = ["a", "b", *(f"net/{letter}" for letter in "cdefgh"), "i", "j"]
    steps = [LayerCall(name, 1.0, 0, (KeptTensor(90, None, True), KeptTensor(10, n + 1, True)))
             for n, name in enumerate(names)]  # fmt: skip
    plan = plan_segments(steps, batch_size=1)
    assert any(each.startswith("net/") for each in plan.cuts)
    for each in plan.segments[:-1]:
        inside = [name.startswith("net/") for name in names[names.index(each.first) : names.index(each.last) + 1]]
        assert all(inside) or not any(inside) or sum(inside) == 6, each


def test_cuts_that_are_given_get_the_edges_of_the_nested_model():
    model = kerasmem.recompute(stack(6, 8), cuts=["backbone/dense_1", "backbone/dense_3"])
    assert model.cuts == ("scale", "backbone/dense_1", "backbone/dense_3")
    assert model.recomputed == (True, True, True, False)
