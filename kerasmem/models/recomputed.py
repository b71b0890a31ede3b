"""The Keras model that recomputes its inside in segments: what is saved with it, and how it runs.

It is the Functional model with the same layers, and a list of cuts. A cut is the name of an operation after whose
(last) call one segment ends and the next begins; "mobilenet/conv1" is one of the model "mobilenet" inside the model.
Where a cut lies inside a nested model, that is called as a recomputed model too, with the cuts that are its own.
Names in a tuple are cuts of the segment that comes next: they count while it runs again.

In Keras's files it is a plain Functional model, alone and inside another one: the class goes by that name, and its
configuration tells the cuts only where `kerasmem.models.vocabulary.configuration` asks for them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import keras

from kerasmem.compat.keras_compile import compile_arguments
from kerasmem.compat.keras_functional import calls_of, check_recomputable, functional_class, graph_of
from kerasmem.errors import UsageError
from kerasmem.models.backend import runs_on_jax
from kerasmem.models.segment_scope import MakeCall, SegmentFunction, call_at_once
from kerasmem.models.vocabulary import CUTS_TOLD, OWN_NAME

if runs_on_jax():
    from kerasmem.models.segment_checkpoint import gradients_wanted, run_segment
else:
    from kerasmem.models.segment_gradient import gradients_wanted, run_segment

_MARK = "_kerasmem_segments"
Cuts = str | Sequence[str]
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
        inside: where it is the call of a nested model with cuts of its own: what is called in its place.
        parts: the segments that it consists of while it runs again, the last of them kept.
    """

    nodes: tuple[Any, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    recomputed: bool
    inside: Any = None
    parts: tuple[Segment, ...] = ()

    @functools.cached_property
    def layers(self) -> list[Any]:
        """The layers that it calls."""
        operations = {id(each.operation): each.operation for each in self.nodes}
        return [each for each in operations.values() if isinstance(each, keras.Layer)]

    @property
    def trainable_variables(self) -> list[Any]:
        """The weights of its layers that are trained."""
        return [each for layer in self.layers for each in layer.trainable_variables]


def parted(cuts: Sequence[Cuts]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the ends of segments, and for each segment, the last one too, the cuts inside it.

    Examples:
        >>> parted(["a", ("b", "c"), "d"])
        (('a', 'd'), [(), ('b', 'c'), ()])

    Raises:
        UsageError: one is neither a name nor a tuple of names.
    """
    ends: list[str] = []
    inner: list[tuple[str, ...]] = [()]
    for each in cuts:
        if isinstance(each, str):
            ends.append(each)
            inner.append(())
        elif isinstance(each, (tuple, list)) and all(isinstance(name, str) for name in each):
            inner[-1] += tuple(each)
        else:
            raise UsageError(f"cuts {each!r}: write names of layers, and a tuple of names for cuts inside a segment")
    return tuple(ends), inner


@dataclass(frozen=True)
class ChainCall:
    """A call that a model makes, with the calls that it stands for.

    Attributes:
        node: the call.
        inner: names and calls inside it, in their order, where it is that of a nested model; else it alone.
    """

    node: Any
    inner: tuple[tuple[str, Any], ...]

    @property
    def is_model(self) -> bool:
        """Whether a nested model is called that can be cut inside."""
        return self.inner[0][1] is not self.node


def is_cuttable(model: Any) -> bool:
    """Return whether a model does nothing but call its layers in the order of its graph."""
    source = graph_of(model) if isinstance(model, keras.Model) else None
    kinds = (Functional, RecomputedFunctional)
    return source is not None and type(source) in kinds and type(model) in (*kinds, keras.Sequential)


def chain_of(model: Any) -> list[ChainCall]:
    """Return the calls of a Functional model, with those inside the models that it calls once."""
    calls = calls_of(model)
    made = [id(each.operation) for each in calls]
    chain = []
    for node in calls:
        name = node.operation.name
        opened = is_cuttable(node.operation) and made.count(id(node.operation)) == 1
        inside = [pair for each in chain_of(graph_of(node.operation)) for pair in each.inner] if opened else []
        inner = tuple((f"{name}/{path}", call) for path, call in inside)
        chain.append(ChainCall(node, inner or ((name, node),)))
    return chain


def cut_places(chain: Sequence[ChainCall]) -> dict[str, int]:
    """Return the names that a cut may have: operation → how many calls lie before the cut, its own included."""
    places: dict[str, int] = {}
    place = 0
    for call in chain:
        for name, _ in call.inner:
            place += 1
            path = name.split("/")
            places.update(("/".join(path[:depth]), place) for depth in range(1, len(path) + 1))
    return places


def split(model: Any, cuts: Sequence[Cuts], recomputed: Sequence[bool] | None = None) -> list[Segment]:
    """Return the segments of a Functional model.

    Args:
        model: the model.
        cuts: names of the operations after which a segment ends, and in tuples of those inside the next segment.
        recomputed: for each segment whether it is recomputed; None: all but the last.

    Raises:
        UsageError: a cut is no operation of the model, or not in the model's order.
    """
    chain = chain_of(model)
    names = [name for call in chain for name, _ in call.inner]
    places = cut_places(chain)
    told, inner = parted(cuts)
    for cut in (*told, *itertools.chain(*inner)):
        if cut not in places:
            known = ", ".join(names[:6])
            raise UsageError(f"cut {cut!r}: model {model.name!r} calls no layer of that name; it calls {known}, …")
    ends = [places[cut] for cut in told]
    bounds = [0, *ends, len(names)]
    recomputed = _all_but_last(told) if recomputed is None else recomputed
    within = [[places[each] for each in some] for some in inner]
    whole = [[begin, *some, end] for (begin, end), some in zip(itertools.pairwise(bounds), within, strict=True)]
    if bounds != sorted(set(bounds)) or len(recomputed) != len(told) + 1 or any(e != sorted(set(e)) for e in whole):
        raise UsageError(f"cuts {list(cuts)}: name each layer once, in the order in which the model calls them")
    groups = list(_grouped(chain, bounds, recomputed, names, within))
    return _segments(groups, {id(each) for each in model.outputs})


def _segments(groups: Sequence[_Group], wanted: Set[int]) -> list[Segment]:
    """Return groups of calls as segments, given the ids of the tensors that are needed after the last of them."""
    segments = []
    for number, group in enumerate(groups):
        made = {id(tensor): None for each in group.nodes for tensor in each.outputs}
        needed = {id(tensor): None for each in group.nodes for tensor in each.input_tensors}
        after = [each for other in groups[number + 1 :] for each in other.nodes]
        later = wanted | {id(tensor) for each in after for tensor in each.input_tensors}
        entering = tuple(key for key in needed if key not in made)
        leaving = tuple(key for key in made if key in later)
        parts = _segments(list(_parts(group)), set(leaving)) if group.cuts else ()
        segments.append(Segment(tuple(group.nodes), entering, leaving, group.recomputed, group.inside, tuple(parts)))
    return segments


def _parts(group: _Group) -> Iterator[_Group]:
    """Yield the parts of a segment that is cut itself.

    Raises:
        UsageError: a cut lies inside a model that the segment calls as a whole.
    """
    numbers = {end: number for number, end in enumerate(group.ends, 1)}
    wrong = [each for each in group.cuts if each not in numbers]
    if wrong:
        raise UsageError("cuts inside a segment: one lies in a model that the segment calls as a whole")
    for begin, end in itertools.pairwise([0, *(numbers[each] for each in group.cuts), len(group.nodes)]):
        yield _Group(group.number, end != len(group.nodes), group.nodes[begin:end])


def _all_but_last(cuts: Sequence[str]) -> tuple[bool, ...]:
    return (True,) * len(cuts) + (False,)


@dataclass
class _Group:
    number: int | None  # of the segment that it is a part of; None where it is a nested model with cuts inside
    recomputed: bool
    nodes: list[Any] = field(default_factory=list)
    inside: Any = None
    cuts: Sequence[int] = ()  # places where it is cut itself
    ends: list[int] = field(default_factory=list)  # the places where its calls end


def _grouped(
    chain: Sequence[ChainCall],
    bounds: Sequence[int],
    recomputed: Sequence[bool],
    names: Sequence[str],
    within: Sequence[Sequence[int]],
) -> Iterator[_Group]:
    """Yield the calls between two cuts together, and each nested model with cuts inside alone."""
    numbers = [number for number, size in enumerate(_sizes(bounds)) for _ in range(size)]  # of each call's segment
    group: _Group | None = None
    begin = 0
    for call in chain:
        end = begin + len(call.inner)
        first, last = numbers[begin], numbers[end - 1]
        if (group is not None and group.number != first) or first != last:
            yield from () if group is None else (group,)
            group = None
        if first != last:
            model, skipped = call.node.operation, len(call.node.operation.name) + 1
            cuts: list[Cuts] = []
            for number in range(first, last + 1):
                own = tuple(names[place - 1][skipped:] for place in within[number] if begin < place < end)
                cuts += [own] if own else []
                cuts += [names[bounds[number + 1] - 1][skipped:]] if number < last else []
            yield _Group(None, False, [call.node], _cut_inside(model, cuts, recomputed[first : last + 1]))
        else:
            group = group or _Group(first, recomputed[first], cuts=within[first])
            group.nodes.append(call.node)
            group.ends.append(end)
        begin = end
    yield from () if group is None else (group,)


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def _cut_inside(model: Any, cuts: Sequence[Cuts], recomputed: Sequence[bool]) -> Any:
    """Return what runs in a nested model's place: the same layers, cut."""
    return _made_again(model, RecomputedFunctional, cuts=cuts, recomputed=recomputed)


def _made_again(model: Any, kind: Any, **options: Any) -> Any:
    """Return a model of another class with the same layers, calls and policy."""
    source = graph_of(model)
    made = kind(source.input, source.output, name=model.name, **options)
    made.dtype_policy = model.dtype_policy
    return made


class _Configuration(dict[str, Any]):
    """A Functional model's configuration that remembers the cuts, which are no part of it."""

    cuts: tuple[Cuts, ...] = ()
    recomputed: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class _Untracked:
    """Holds what Keras is not to look through for layers: those inside are the model's own already."""

    held: Any


class RecomputedFunctional(Functional):
    """A Functional model that keeps only what crosses its cuts, and computes the rest again for the gradient.

    Made by `kerasmem.recompute`. Without a gradient (`predict`, `evaluate`) it runs as the plain model does.

    Args:
        inputs: as for `keras.Model`.
        outputs: as for `keras.Model`.
        name: as for `keras.Model`.
        cuts: names of the operations after which a segment ends, in the order of the model; in tuples, those after
            which the next segment is cut itself while it runs again.
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
        self._cuts = tuple(each if isinstance(each, str) else tuple(each) for each in cuts)
        told = _all_but_last(parted(self._cuts)[0]) if recomputed is None else recomputed
        self._recomputed = tuple(map(bool, told))
        self.plan: Any = None  # of `kerasmem.recompute`; not saved
        self._inside = _Untracked(split(self, self._cuts, self._recomputed))

    @property
    def cuts(self) -> tuple[Cuts, ...]:
        """The names of the operations after which a segment ends, and in tuples those inside the next segment."""
        return self._cuts

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """For each segment whether its inside is recomputed rather than kept."""
        return self._recomputed

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda op: op, **kwargs: Any) -> Any:
        symbolic = _is_symbolic(inputs)
        if symbolic or kwargs.get("call_fn") is not None or not gradients_wanted():
            outputs = super()._run_through_graph(inputs, operation_fn=operation_fn, **kwargs)
            if symbolic:
                for each in keras.tree.flatten(outputs):  # so that a clone has the same cuts
                    setattr(each, _MARK, (self._cuts, self._recomputed))
            return outputs
        tensors = dict(zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True))
        for segment in self._inside.held:
            run = _runner(segment, operation_fn)
            entering = [tensors.get(key) for key in segment.entering]
            is_run = segment.layers and self._cuts and segment.inside is None
            leaving = run_segment(run, entering, segment.layers, segment.recomputed) if is_run else run(entering)
            tensors.update(zip(segment.leaving, leaving, strict=True))
        return keras.tree.pack_sequence_as(self._outputs_struct, [tensors[id(each)] for each in self.outputs])

    def plain(self) -> Any:
        """Return the Functional model with the same layers, weights and compiled state, which recomputes nothing."""
        made = _made_again(self, keras.Model)
        if self.compiled:
            made.compile(**compile_arguments(self))
        return made

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the Functional model; the cuts are in it for kerasmem alone."""
        cuts = {"cuts": list(self._cuts), "recomputed": list(self._recomputed)} if CUTS_TOLD.get() else {}
        config = _Configuration({**super().get_config(), **cuts})
        config.cuts, config.recomputed = self._cuts, self._recomputed
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return the model of a configuration, with the cuts that come with it."""
        if isinstance(config, _Configuration):
            config = {**config, "cuts": config.cuts, "recomputed": config.recomputed}
        return super().from_config(config, custom_objects)

    def __reduce__(self) -> Any:
        return _recomputed, (self.plain(), self._cuts, self._recomputed)


# Keras writes a class's name and module into its files, and names the weights of a nested model by its class.
RecomputedFunctional.__name__, RecomputedFunctional.__module__ = Functional.__name__, Functional.__module__
keras.saving.get_custom_objects()[OWN_NAME] = RecomputedFunctional


def _recomputed(plain: Any, cuts: Sequence[Cuts], recomputed: Sequence[bool]) -> Any:
    made = _cut_inside(plain, cuts, recomputed)
    if plain.compiled:
        made.compile(**compile_arguments(plain))
    return made


class WalkedFunctional(Functional):
    """Runs as the plain model does, each call made by a function that is given, those inside nested models included.

    Args:
        inputs: as for `keras.Model`.
        outputs: as for `keras.Model`.
        name: as for `keras.Model`.
        make_call: makes each call of what is no nested model.
        tensors: where the tensors go, by the ids of the symbolic ones.
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
    def run(entering: list[Any], make_call: MakeCall = call_at_once, again: bool = False) -> list[Any]:
        tensors = dict(zip(segment.entering, entering, strict=True))
        parts = segment.parts if again else ()
        for part in parts[:-1]:
            taken = [tensors.get(key) for key in part.entering]
            of_part = _runner(part, operation_fn)
            call = functools.partial(run_segment, of_part, taken, part.layers, True)
            made = make_call(call, taken, part) if part.layers else of_part(taken, make_call)
            tensors.update(zip(part.leaving, made, strict=True))
        for node in (parts[-1] if parts else segment).nodes:
            args, kwargs = node.arguments.fill_in(tensors)
            call = functools.partial(operation_fn(segment.inside or node.operation), *args, **kwargs)
            taken = [tensors.get(id(each)) for each in node.input_tensors]
            outputs = make_call(call, taken, node.operation)
            tensors.update(zip(map(id, node.outputs), outputs, strict=False))
        return [tensors[key] for key in segment.leaving]

    return run
