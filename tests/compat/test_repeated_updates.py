"""Updates that are played back: the traced graph is the one that Keras traces by itself."""

from __future__ import annotations

import contextlib

import keras
import pytest

from kerasmem.compat import repeated_updates
from kerasmem.compat.borrowing import Borrowed
from kerasmem.models import step
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import open_model

layers, optimizers = keras.layers, keras.optimizers


class ByName(optimizers.SGD):
    """Its update is another one for each variable."""

    def update_step(self, gradient, variable, learning_rate):
        for _ in range(1 + len(self._trainable_variables) - self._get_variable_index(variable)):
            gradient = gradient * 0.5
        super().update_step(gradient, variable, learning_rate)


def model_with(optimizer):
    def build():
        dense = [layers.Dense(width, name=f"dense_{place}") for place, width in enumerate((7, 5, 7, 3))]
        model = keras.Sequential([keras.Input((6,)), *dense, layers.LayerNormalization(name="norm")], name="model")
        model.compile(optimizer(), "mse")
        return model

    return build


def graph_of(build):
    """The operations of the traced step and of its branches, and its variables in the order in which they are taken."""
    with open_model(build) as opened:
        structure, inputs = model_inputs(opened.model, {})
        traced = step.trace_step(step.prepare_step(opened.model, opened.training, structure, inputs, 4))
    definition = traced.function.graph.as_graph_def()
    bodies = [_plain(function.node_def) for function in definition.library.function]  # in no order
    return _plain(definition.node), sorted(bodies), [(name, each.path) for name, each in traced.captures.items()]


def _plain(nodes):
    for node in nodes:
        for name, value in list(node.attr.items()):
            if name == "_gradient_op_type" or value.HasField("func"):  # with a number that counts on in the process
                del node.attr[name]
    return [node.SerializeToString(deterministic=True) for node in nodes]


@pytest.fixture
def played(monkeypatch):
    """The kinds of update that were played back, as often as they were."""
    found = []
    play = repeated_updates._play
    monkeypatch.setattr(repeated_updates, "_play", lambda kind, *rest: (found.append(kind), play(kind, *rest)))
    return found


@pytest.mark.parametrize(
    ("optimizer", "is_played"),
    [
        (lambda: optimizers.Adam(amsgrad=True, weight_decay=0.01, name="own"), True),
        (lambda: optimizers.SGD(momentum=0.9, nesterov=True, clipnorm=1.0, name="own"), True),
        (lambda: optimizers.Adafactor(name="own"), True),
        (lambda: optimizers.LossScaleOptimizer(optimizers.RMSprop(centered=True, name="own"), name="scaled"), True),
        (lambda: ByName(name="own"), False),
    ],
    ids=["adam", "sgd", "adafactor", "loss scale", "by name"],
)
def test_the_graph_is_the_one_that_keras_traces(monkeypatch, played, optimizer, is_played):
    build = model_with(optimizer)
    quick = graph_of(build)
    assert bool(played) == is_played
    monkeypatch.setattr(step, "updates_played_back", contextlib.nullcontext)
    assert graph_of(build) == quick


def test_variables_of_another_shape_are_traced_until_two_shapes_agree():
    import tensorflow as tf

    kind, same = repeated_updates._Kind(), repeated_updates._Listener(tf.Graph(), {})
    assert not kind.serves((3,))
    for shape in ((3,), (3,)):
        kind.add(shape, same)
    assert kind.serves((3,))
    assert not kind.serves((4,))
    kind.add((4,), same)
    assert kind.serves((5,))
    same.is_lost = True
    kind.add((6,), same)
    assert not kind.serves((3,))


def test_without_what_it_takes_all_are_traced(monkeypatch):
    update = repeated_updates.UPDATE.get()
    with repeated_updates.updates_played_back():
        assert repeated_updates.UPDATE.get() is not update
    monkeypatch.setattr(repeated_updates, "_WATCH", Borrowed("json", "gone", feature="an example"))
    with repeated_updates.updates_played_back():
        assert repeated_updates.UPDATE.get() is update
