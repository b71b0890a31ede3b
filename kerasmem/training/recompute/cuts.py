"""From the names of cuts to the segments of a Functional model.

A cut is the name of an operation after whose (last) call one segment ends and the next begins; "mobilenet/conv1" is one
of the model "mobilenet" inside the model. If a cut lies inside a nested model, that is a segment of its own, with
the cuts that are its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from kerasmem.compat.keras_layers import calls_of, functional_class, graph_of
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras

CutInside = Callable[[Any, Sequence[str], Sequence[bool]], Any]
CUTTABLE: set[type] = set()  # classes beside Functional whose models do nothing but call their layers


@dataclass(frozen=True)
class Segment:
    """A run of operations between two cuts.

    Attributes:
        nodes: the calls, in the order in which the model makes them.
        entering: ids of the symbolic tensors that come from before.
        leaving: ids of those that something after, or the model's output, needs.
        recomputed: whether its inside is computed again for the gradient, rather than kept.
        inside: if it is the call of a nested model with cuts of its own: what is called in its place.
    """

    nodes: tuple[Any, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    recomputed: bool
    inside: Any = None

    @functools.cached_property
    def layers(self) -> list[Any]:
        """The layers that it calls."""
        operations = {id(each.operation): each.operation for each in self.nodes}
        layer = import_keras().Layer
        return [each for each in operations.values() if isinstance(each, layer)]


@dataclass(frozen=True)
class ChainCall:
    """A call that a model makes, with the calls that it stands for.

    Attributes:
        node: the call.
        inner: names and calls inside it, in their order, if it is that of a nested model; else it alone.
    """

    node: Any
    inner: tuple[tuple[str, Any], ...]

    @property
    def is_model(self) -> bool:
        """Whether a nested model is called that can be cut inside."""
        return self.inner[0][1] is not self.node


def is_cuttable(model: Any) -> bool:
    """Return whether a model does nothing but call its layers in the order of its graph."""
    keras = import_keras()
    source = graph_of(model) if isinstance(model, keras.Model) else None
    kinds = {functional_class(), *CUTTABLE}
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


def split(
    model: Any,
    cuts: Sequence[str],
    recomputed: Sequence[bool] | None = None,
    cut_inside: CutInside = lambda model, cuts, recomputed: model,
) -> list[Segment]:
    """Return the segments of a Functional model.

    Args:
        model: the model.
        cuts: names of the operations after which a segment ends.
        recomputed: for each segment whether it is recomputed; None: all but the last.
        cut_inside: from a nested model, its cuts, and which of its segments are recomputed, to what runs in its place.

    Raises:
        UsageError: If a cut is no operation of the model, or not in the model's order.
    """
    chain = chain_of(model)
    names = [name for call in chain for name, _ in call.inner]
    places = cut_places(chain)
    for cut in cuts:
        if not isinstance(cut, str) or cut not in places:
            known = ", ".join(names[:6])
            raise UsageError(f"cut {cut!r}: model {model.name!r} calls no layer of that name; it calls {known}, …")
    bounds = [0, *(places[cut] for cut in cuts), len(names)]
    recomputed = all_but_last(cuts) if recomputed is None else recomputed
    if bounds != sorted(set(bounds)) or len(recomputed) != len(cuts) + 1:
        raise UsageError(f"cuts {list(cuts)}: name each layer once, in the order in which the model calls them")
    groups = list(_grouped(chain, bounds, recomputed, cut_inside))
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
        segments.append(Segment(tuple(group.nodes), entering, leaving, group.recomputed, group.inside))
    return segments


def all_but_last(cuts: Sequence[str]) -> tuple[bool, ...]:
    """Return for each segment between such cuts whether it is recomputed, if nothing else was said."""
    return (True,) * len(cuts) + (False,)


@dataclass
class _Group:
    number: int | None  # of the segment that it is a part of; None if it is a nested model with cuts inside
    recomputed: bool
    nodes: list[Any] = field(default_factory=list)
    inside: Any = None


def _grouped(
    chain: Sequence[ChainCall],
    bounds: Sequence[int],
    recomputed: Sequence[bool],
    cut_inside: CutInside,
) -> Iterator[_Group]:
    """Yield the calls between two cuts together, and each nested model with cuts inside alone."""
    names = [name for call in chain for name, _ in call.inner]
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]  # of each call's segment
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
            cuts = [names[place - 1][skipped:] for place in bounds[first + 1 : last + 1]]
            yield _Group(None, False, [call.node], cut_inside(model, cuts, recomputed[first : last + 1]))
        else:
            group = group or _Group(first, recomputed[first])
            group.nodes.append(call.node)
        begin = end
    yield from () if group is None else (group,)
