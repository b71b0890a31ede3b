"""The segments of a Functional model between cuts.

A cut is the name of an operation. After its (last) call one segment ends and the next begins. "mobilenet/conv1" is an
operation of the model "mobilenet" inside the model. If a nested model contains cuts, it is a separate segment with
those cuts.
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
CUTTABLE: set[type] = set()  # subclasses of Functional that only call their layers


@dataclass(frozen=True)
class Segment:
    """A run of operations between two cuts.

    Attributes:
        nodes: the calls, in the order of the model.
        entering: ids of the symbolic tensors from earlier segments.
        leaving: ids of the symbolic tensors for later segments or the model's outputs.
        recomputed: whether the gradient recomputes its inside rather than keeping it.
        inside: replacement of a nested model with cuts; None for other segments.
    """

    nodes: tuple[Any, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    recomputed: bool
    inside: Any = None

    @functools.cached_property
    def layers(self) -> list[Any]:
        """Layers of the calls."""
        operations = {id(node.operation): node.operation for node in self.nodes}
        layer = import_keras().Layer
        return [operation for operation in operations.values() if isinstance(operation, layer)]


@dataclass(frozen=True)
class ChainCall:
    """A call of a model, with the calls inside it.

    Attributes:
        node: the call.
        inner: names and calls inside a nested model, in their order; the call itself for other operations.
    """

    node: Any
    inner: tuple[tuple[str, Any], ...]

    @property
    def is_model(self) -> bool:
        """Whether it calls a nested model that can be cut inside."""
        return self.inner[0][1] is not self.node


def is_cuttable(model: Any) -> bool:
    """Return whether a model only calls its layers in the order of its graph."""
    keras = import_keras()
    source = graph_of(model) if isinstance(model, keras.Model) else None
    kinds = {functional_class(), *CUTTABLE}
    return source is not None and type(source) in kinds and type(model) in (*kinds, keras.Sequential)


def chain_of(model: Any) -> list[ChainCall]:
    """Return the calls of a Functional model, with those inside models that are called once."""
    calls = calls_of(model)
    called = [id(node.operation) for node in calls]
    chain = []
    for node in calls:
        name = node.operation.name
        is_opened = is_cuttable(node.operation) and called.count(id(node.operation)) == 1
        inside = [pair for call in chain_of(graph_of(node.operation)) for pair in call.inner] if is_opened else []
        inner = tuple((f"{name}/{path}", call) for path, call in inside)
        chain.append(ChainCall(node, inner or ((name, node),)))
    return chain


def cut_positions(chain: Sequence[ChainCall]) -> dict[str, int]:
    """Return the possible cuts: name of the operation → number of calls up to and including its own."""
    positions: dict[str, int] = {}
    position = 0
    for call in chain:
        for name, _ in call.inner:
            position += 1
            path = name.split("/")
            positions.update(("/".join(path[:depth]), position) for depth in range(1, len(path) + 1))
    return positions


def split(
    model: Any,
    cuts: Sequence[str],
    recomputed: Sequence[bool] | None = None,
    cut_inside: CutInside = lambda model, cuts, recomputed: model,
) -> list[Segment]:
    """Return the segments of a Functional model.

    Args:
        model: the model.
        cuts: names of the last operations of segments.
        recomputed: whether each segment is recomputed. Defaults to all but the last.
        cut_inside: from a nested model, its cuts and its `recomputed` to its replacement.

    Raises:
        UsageError: If a cut is not an operation of the model, or not in the model's order.
    """
    chain = chain_of(model)
    names = [name for call in chain for name, _ in call.inner]
    positions = cut_positions(chain)
    for cut in cuts:
        if not isinstance(cut, str) or cut not in positions:
            known = ", ".join(names[:6])
            raise UsageError(f"cuts must be layers that model {model.name!r} calls ({known}, …); got {cut!r}")
    bounds = [0, *(positions[cut] for cut in cuts), len(names)]
    recomputed = all_but_last(cuts) if recomputed is None else recomputed
    if bounds != sorted(set(bounds)) or len(recomputed) != len(cuts) + 1:
        raise UsageError(f"cuts must name each layer once, in the order of the model's calls; got {list(cuts)}")
    groups = list(_group_calls(chain, bounds, recomputed, cut_inside))
    return _segments(groups, {id(tensor) for tensor in model.outputs})


def _segments(groups: Sequence[_Group], outputs: Set[int]) -> list[Segment]:
    """Return groups of calls as segments, given the ids of the model's outputs."""
    segments = []
    for number, group in enumerate(groups):
        results = {id(tensor): None for node in group.nodes for tensor in node.outputs}
        needed = {id(tensor): None for node in group.nodes for tensor in node.input_tensors}
        after = [node for other in groups[number + 1 :] for node in other.nodes]
        later = outputs | {id(tensor) for node in after for tensor in node.input_tensors}
        entering = tuple(key for key in needed if key not in results)
        leaving = tuple(key for key in results if key in later)
        segments.append(Segment(tuple(group.nodes), entering, leaving, group.recomputed, group.inside))
    return segments


def all_but_last(cuts: Sequence[str]) -> tuple[bool, ...]:
    """Return the default of `recomputed` for these cuts."""
    return (True,) * len(cuts) + (False,)


@dataclass
class _Group:
    number: int | None  # of its segment; None for a nested model with cuts inside
    recomputed: bool
    nodes: list[Any] = field(default_factory=list)
    inside: Any = None


def _group_calls(
    chain: Sequence[ChainCall],
    bounds: Sequence[int],
    recomputed: Sequence[bool],
    cut_inside: CutInside,
) -> Iterator[_Group]:
    """Yield the calls between two cuts as one group, and each nested model with cuts inside as another."""
    names = [name for call in chain for name, _ in call.inner]
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]  # segment of each call
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
            cuts = [names[bound - 1][skipped:] for bound in bounds[first + 1 : last + 1]]
            yield _Group(None, False, [call.node], cut_inside(model, cuts, recomputed[first : last + 1]))
        else:
            group = group or _Group(first, recomputed[first])
            group.nodes.append(call.node)
        begin = end
    yield from () if group is None else (group,)
