"""The Keras model that recomputes its inside in segments: its saving and its call.

It is the Functional model with the same layers, and a list of cuts (see `cuts`). If a cut lies inside a
nested model, that is called as a recomputed model too.

In Keras's files it is a plain Functional model, alone and inside another one: the class goes by that name, and its
configuration has no cuts. `kerasmem.models.vocabulary.configuration` adds them, for kerasmem's own processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from kerasmem.compat.keras_layers import check_recomputable, functional_class, graph_of
from kerasmem.models.backend import runs_on_jax
from kerasmem.models.vocabulary import OWN_NAME
from kerasmem.training.recompute.cuts import CUTTABLE, Segment, all_but_last, chain_of, split
from kerasmem.training.recompute.segments import MakeCall, SegmentFunction, call_at_once

if runs_on_jax():
    from kerasmem.training.recompute.segments import jax_gradients_wanted as gradients_wanted
    from kerasmem.training.recompute.segments import run_jax_segment as run_segment
else:
    from kerasmem.training.recompute.gradient import gradients_wanted, run_segment

check_recomputable()
Functional: Any = functional_class()


def _cut_inside(model: Any, cuts: Sequence[str], recomputed: Sequence[bool]) -> Any:
    """Return a nested model with the same layers, cut."""
    return _made_again(model, RecomputedFunctional, cuts=cuts, recomputed=recomputed)


def _made_again(model: Any, kind: Any, **options: Any) -> Any:
    """Return a model of another class with the same layers, calls and policy."""
    source = graph_of(model)
    made = kind(source.input, source.output, name=model.name, **options)
    made.dtype_policy = model.dtype_policy
    return made


@dataclass(frozen=True)
class _Untracked:
    """Hides its content from Keras's search for layers, which belong to the model already."""

    held: Any


class RecomputedFunctional(Functional):
    """A Functional model that keeps the tensors at its cuts and recomputes the rest.

    Made by `kerasmem.recompute`. Without a gradient (`predict`, `evaluate`) it runs as the plain model does.

    Args:
        inputs: as for `keras.Model`.
        outputs: as for `keras.Model`.
        name: as for `keras.Model`.
        cuts: names of the operations after which a segment ends, in the order of the model.
        recomputed: for each segment whether it is recomputed; None: all but the last.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Keras before 3.15 saves and clones a Functional subclass as such only if its `__init__` is written like this.
        cuts, recomputed = kwargs.pop("cuts", ()), kwargs.pop("recomputed", None)
        super().__init__(*args, **kwargs)
        self._cuts = tuple(cuts)
        self._recomputed = all_but_last(self._cuts) if recomputed is None else tuple(map(bool, recomputed))
        self.plan: Any = None  # of `kerasmem.recompute`; not saved
        self._inside = _Untracked(split(self, self._cuts, self._recomputed, _cut_inside))

    @property
    def cuts(self) -> tuple[str, ...]:
        """The name of the last operation of each segment but the last."""
        return self._cuts

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """For each segment whether its inside is recomputed rather than kept."""
        return self._recomputed

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda op: op, **kwargs: Any) -> Any:
        if _is_symbolic(inputs) or kwargs.get("call_fn") is not None or not gradients_wanted():
            return super()._run_through_graph(inputs, operation_fn=operation_fn, **kwargs)
        tensors = dict(zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True))
        for segment in self._inside.held:
            run = _runner(segment, operation_fn)
            entering = [tensors.get(key) for key in segment.entering]
            is_run = segment.layers and self._cuts and segment.inside is None
            leaving = run_segment(run, entering, segment.layers, segment.recomputed) if is_run else run(entering)
            tensors.update(zip(segment.leaving, leaving, strict=True))
        return keras.tree.pack_sequence_as(self._outputs_struct, [tensors[id(each)] for each in self.outputs])


# Keras writes a class's name and module into its files, and names the weights of a nested model by its class.
RecomputedFunctional.__name__, RecomputedFunctional.__module__ = Functional.__name__, Functional.__module__
keras.saving.get_custom_objects()[OWN_NAME] = RecomputedFunctional
CUTTABLE.add(RecomputedFunctional)


class WalkedFunctional(Functional):
    """Runs as the plain model does, each call made by a function that is given, those inside nested models included.

    Args:
        inputs: as for `keras.Model`.
        outputs: as for `keras.Model`.
        name: as for `keras.Model`.
        make_call: makes each call of what is no nested model.
        tensors: dictionary that receives the tensors, by the ids of the symbolic ones.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        make_call, tensors = kwargs.pop("make_call"), kwargs.pop("tensors")
        super().__init__(*args, **kwargs)
        self._walk = _Untracked((make_call, tensors))

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda op: op, **kwargs: Any) -> Any:
        if kwargs.get("call_fn") is not None or _is_symbolic(inputs):
            return super()._run_through_graph(inputs, operation_fn=operation_fn, **kwargs)
        make_call, tensors = self._walk.held
        tensors.update(zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True))
        for call in chain_of(self):
            args, kwargs = call.node.arguments.fill_in(tensors)
            operation = call.node.operation
            if call.is_model:
                outputs = keras.tree.flatten(operation_fn(walked(operation, make_call, tensors))(*args, **kwargs))
            else:
                taken = [tensors.get(id(each)) for each in call.node.input_tensors]
                outputs = make_call(functools.partial(operation_fn(operation), *args, **kwargs), taken, operation)
            tensors.update(zip(map(id, call.node.outputs), outputs, strict=False))
        return keras.tree.pack_sequence_as(self._outputs_struct, [tensors[id(each)] for each in self.outputs])


def walked(model: Any, make_call: MakeCall, tensors: dict[int, Any]) -> Any:
    """Return the model as one that has `make_call` make each call, and writes into `tensors` (see its class)."""
    return _made_again(model, WalkedFunctional, make_call=make_call, tensors=tensors)


def _is_symbolic(inputs: Any) -> bool:
    return any(isinstance(each, keras.KerasTensor) for each in keras.tree.flatten(inputs))


def _runner(segment: Segment, operation_fn: Callable[[Any], Any]) -> SegmentFunction:
    def run(entering: list[Any], make_call: MakeCall = call_at_once) -> list[Any]:
        tensors = dict(zip(segment.entering, entering, strict=True))
        for node in segment.nodes:
            args, kwargs = node.arguments.fill_in(tensors)
            call = functools.partial(operation_fn(segment.inside or node.operation), *args, **kwargs)
            taken = [tensors.get(id(each)) for each in node.input_tensors]
            outputs = make_call(call, taken, node.operation)
            tensors.update(zip(map(id, node.outputs), outputs, strict=False))
        return [tensors[key] for key in segment.leaving]

    return run
