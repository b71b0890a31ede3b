"""The Keras model that recomputes its inside in segments.

It is a Functional model with the same layers and a list of cuts (see `cuts`). If a nested model contains a cut, it is
called as a recomputed model too.

Keras saves it as a plain Functional model: the class has that name, and its configuration has no cuts.
`kerasmem.models.vocabulary.configuration` adds them for processes of kerasmem.
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
    """Return a recomputed copy of a nested model with the same layers."""
    return _copy_as(model, RecomputedFunctional, cuts=cuts, recomputed=recomputed)


def _copy_as(model: Any, kind: Any, **options: Any) -> Any:
    """Return a model of another class with the same layers, calls and policy."""
    source = graph_of(model)
    copy = kind(source.input, source.output, name=model.name, **options)
    copy.dtype_policy = model.dtype_policy
    return copy


@dataclass(frozen=True)
class _Untracked:
    """Hides layers from Keras's tracking, as the model tracks them already."""

    content: Any


class RecomputedFunctional(Functional):
    """A Functional model that keeps the tensors at its cuts and recomputes the others.

    Without a gradient (`predict`, `evaluate`) it runs like the plain model.

    Args:
        inputs, outputs, name: as for `keras.Model`.
        cuts: names of the last operations of segments, in the order of the model.
        recomputed: whether each segment is recomputed. Defaults to all but the last.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Keras before 3.15 saves and clones a Functional subclass only if its `__init__` has these arguments.
        cuts, recomputed = kwargs.pop("cuts", ()), kwargs.pop("recomputed", None)
        super().__init__(*args, **kwargs)
        self._cuts = tuple(cuts)
        self._recomputed = all_but_last(self._cuts) if recomputed is None else tuple(map(bool, recomputed))
        self.plan: Any = None  # set by `kerasmem.recompute`, not saved
        self._inside = _Untracked(split(self, self._cuts, self._recomputed, _cut_inside))

    @property
    def cuts(self) -> tuple[str, ...]:
        """Names of the last operations of all segments but the last."""
        return self._cuts

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """Whether each segment is recomputed rather than kept."""
        return self._recomputed

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda op: op, **kwargs: Any) -> Any:
        if _is_symbolic(inputs) or kwargs.get("call_fn") is not None or not gradients_wanted():
            return super()._run_through_graph(inputs, operation_fn=operation_fn, **kwargs)
        tensors = dict(zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True))
        for segment in self._inside.content:
            run = _runner(segment, operation_fn)
            entering = [tensors.get(key) for key in segment.entering]
            is_run = segment.layers and self._cuts and segment.inside is None
            leaving = run_segment(run, entering, segment.layers, segment.recomputed) if is_run else run(entering)
            tensors.update(zip(segment.leaving, leaving, strict=True))
        return keras.tree.pack_sequence_as(self._outputs_struct, [tensors[id(output)] for output in self.outputs])


# Keras writes the class's name and module into files, and names the weights of nested models by their class.
RecomputedFunctional.__name__, RecomputedFunctional.__module__ = Functional.__name__, Functional.__module__
keras.saving.get_custom_objects()[OWN_NAME] = RecomputedFunctional
CUTTABLE.add(RecomputedFunctional)


class WalkedFunctional(Functional):
    """Runs like the plain model, and passes each call to a function, including those inside nested models.

    Args:
        inputs, outputs, name: as for `keras.Model`.
        make_call: makes each call except those of nested models.
        tensors: dictionary that receives the tensors, by the ids of the symbolic ones.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        make_call, tensors = kwargs.pop("make_call"), kwargs.pop("tensors")
        super().__init__(*args, **kwargs)
        self._walk = _Untracked((make_call, tensors))

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda op: op, **kwargs: Any) -> Any:
        if kwargs.get("call_fn") is not None or _is_symbolic(inputs):
            return super()._run_through_graph(inputs, operation_fn=operation_fn, **kwargs)
        make_call, tensors = self._walk.content
        tensors.update(zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True))
        for call in chain_of(self):
            args, kwargs = call.node.arguments.fill_in(tensors)
            operation = call.node.operation
            if call.is_model:
                outputs = keras.tree.flatten(operation_fn(make_walked(operation, make_call, tensors))(*args, **kwargs))
            else:
                inputs = [tensors.get(id(tensor)) for tensor in call.node.input_tensors]
                outputs = make_call(functools.partial(operation_fn(operation), *args, **kwargs), inputs, operation)
            tensors.update(zip(map(id, call.node.outputs), outputs, strict=False))
        return keras.tree.pack_sequence_as(self._outputs_struct, [tensors[id(output)] for output in self.outputs])


def make_walked(model: Any, make_call: MakeCall, tensors: dict[int, Any]) -> Any:
    """Return a copy of the model as a `WalkedFunctional`."""
    return _copy_as(model, WalkedFunctional, make_call=make_call, tensors=tensors)


def _is_symbolic(inputs: Any) -> bool:
    return any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten(inputs))


def _runner(segment: Segment, operation_fn: Callable[[Any], Any]) -> SegmentFunction:
    def run(entering: list[Any], make_call: MakeCall = call_at_once) -> list[Any]:
        tensors = dict(zip(segment.entering, entering, strict=True))
        for node in segment.nodes:
            args, kwargs = node.arguments.fill_in(tensors)
            call = functools.partial(operation_fn(segment.inside or node.operation), *args, **kwargs)
            inputs = [tensors.get(id(tensor)) for tensor in node.input_tensors]
            outputs = make_call(call, inputs, node.operation)
            tensors.update(zip(map(id, node.outputs), outputs, strict=False))
        return [tensors[key] for key in segment.leaving]

    return run
