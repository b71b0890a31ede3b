"""The Keras model that recomputes its inside in segments: what is saved with it, and how it runs.

It is the Functional model with the same layers, and a list of cuts. A cut is the name of an operation after whose
(last) call one segment ends and the next begins. `save` writes the plain model. Importing this module registers the
class with Keras, which is all that `keras.saving.load_model` needs to open a file with one inside another model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from kerasmem.compat.keras_compile import compile_arguments
from kerasmem.compat.keras_functional import calls_of, check_recomputable, functional_class
from kerasmem.errors import UsageError
from kerasmem.models.segment_gradient import gradients_wanted, run_recomputed

_MARK = "_kerasmem_segments"
check_recomputable()
Functional: Any = functional_class()


@dataclass(frozen=True)
class Segment:
    """A run of operations between two cuts.

    Attributes:
        nodes: the calls, in the order in which the model makes them.
        entering: ids of the symbolic tensors that come from before.
        leaving: ids of those that something after, or the model's output, needs.
        recomputed: whether its inside is computed again for the gradient, rather than kept.
    """

    nodes: tuple[Any, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    recomputed: bool


def cut_places(calls: Sequence[Any]) -> dict[str, int]:
    """Return the names that a cut may have: operation → how many calls lie before the cut, its own included."""
    return {each.operation.name: number + 1 for number, each in enumerate(calls)}


def split(model: Any, cuts: Sequence[str], recomputed: Sequence[bool]) -> list[Segment]:
    """Return the segments of a Functional model.

    Raises:
        UsageError: a cut is no operation of the model, or not in the model's order.
    """
    calls = calls_of(model)
    places = cut_places(calls)
    ends = []
    for cut in cuts:
        if cut not in places:
            known = ", ".join(list(places)[:6])
            raise UsageError(f"cut {cut!r}: model {model.name!r} calls no layer of that name; it calls {known}, …")
        ends.append(places[cut])
    if ends != sorted(set(ends)) or len(recomputed) != len(cuts) + 1:
        raise UsageError(f"cuts {list(cuts)}: name each layer once, in the order in which the model calls them")
    wanted_last = {id(each) for each in model.outputs}
    segments = []
    bounds = [0, *ends, len(calls)]
    for begin, end, again in zip(bounds, bounds[1:], recomputed, strict=False):
        inside = calls[begin:end]
        made = {id(tensor): None for each in inside for tensor in each.outputs}
        needed = {id(tensor): None for each in inside for tensor in each.input_tensors}
        later = wanted_last | {id(tensor) for each in calls[end:] for tensor in each.input_tensors}
        segments.append(
            Segment(
                tuple(inside),
                tuple(key for key in needed if key not in made),
                tuple(key for key in made if key in later),
                again,
            )
        )
    return [each for each in segments if each.nodes]


@keras.saving.register_keras_serializable(package="kerasmem")
class RecomputedFunctional(Functional):
    """A Functional model that keeps only what crosses its cuts, and computes the rest again for the gradient.

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
        outputs = args[1] if len(args) > 1 else kwargs["outputs"]
        carried = next(
            (getattr(each, _MARK) for each in keras.tree.flatten(outputs) if hasattr(each, _MARK)), ((), None)
        )
        cuts, recomputed = (kwargs.pop("cuts", carried[0]), kwargs.pop("recomputed", carried[1]))
        super().__init__(*args, **kwargs)
        self._cuts = tuple(cuts)
        self._recomputed = (True,) * len(self._cuts) + (False,) if recomputed is None else tuple(map(bool, recomputed))
        self.plan: Any = None  # of `kerasmem.recompute`; not saved
        split(self, self._cuts, self._recomputed)  # a wrong name is told here and not in the first step

    @property
    def cuts(self) -> tuple[str, ...]:
        """The names of the operations after which a segment ends."""
        return self._cuts

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """For each segment whether its inside is recomputed rather than kept."""
        return self._recomputed

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda op: op, **kwargs: Any) -> Any:
        symbolic = any(isinstance(each, keras.KerasTensor) for each in keras.tree.flatten(inputs))
        if symbolic or kwargs.get("call_fn") is not None or not gradients_wanted():
            outputs = super()._run_through_graph(inputs, operation_fn=operation_fn, **kwargs)
            if symbolic:
                for each in keras.tree.flatten(outputs):  # so that a clone has the same cuts
                    setattr(each, _MARK, (self._cuts, self._recomputed))
            return outputs
        tensors = dict(zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True))
        for segment in split(self, self._cuts, self._recomputed):
            run = _runner(segment, operation_fn)
            entering = [tensors.get(key) for key in segment.entering]
            layers = _layers(segment)
            leaving = run_recomputed(run, entering, layers) if segment.recomputed and layers else run(entering)
            tensors.update(zip(segment.leaving, leaving, strict=True))
        return keras.tree.pack_sequence_as(self._outputs_struct, [tensors[id(each)] for each in self.outputs])

    def plain(self) -> Any:
        """Return the Functional model with the same layers, weights and compiled state, which recomputes nothing."""
        made = keras.Model(self.input, self.output, name=self.name)
        made.dtype_policy = self.dtype_policy
        if self.compiled:
            made.compile(**compile_arguments(self))
        return made

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any) -> None:
        """Save the plain model, so that the file opens wherever Keras does.

        Args:
            filepath, overwrite, zipped, kwargs: as for `keras.Model.save`.
        """
        self.plain().save(filepath, overwrite=overwrite, zipped=zipped, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the Functional model, and the cuts."""
        return {**super().get_config(), "cuts": list(self._cuts), "recomputed": list(self._recomputed)}


def _runner(segment: Segment, operation_fn: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    def run(entering: list[Any]) -> list[Any]:
        tensors = dict(zip(segment.entering, entering, strict=True))
        for node in segment.nodes:
            args, kwargs = node.arguments.fill_in(tensors)
            outputs = operation_fn(node.operation)(*args, **kwargs)
            tensors.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=False))
        return [tensors[key] for key in segment.leaving]

    return run


def _layers(segment: Segment) -> list[Any]:
    found = {id(each.operation): each.operation for each in segment.nodes if isinstance(each.operation, keras.Layer)}
    return list(found.values())
