"""A model as the planner sees it: a chain of steps with their kept and outgoing tensors. Pure.

A step is one call of a layer. Between any two neighbouring steps lies a place where the chain may be cut. What must be
remembered at a cut are the tensors that cross it; what lies between two cuts can be computed again from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """A tensor that a step makes and that is not gone when the step is over. Sizes in bytes.

    Attributes:
        bytes: its size.
        first_use: the number of the first later step that takes it; None if none does.
        last_use: of the last one; the number of steps if it is an output of the model; None if none takes it.
        for_gradient: whether the backward pass needs its value.
        for_own_gradient: whether the gradient of the very step that makes it does.
    """

    bytes: int
    first_use: int | None
    last_use: int | None
    for_gradient: bool
    for_own_gradient: bool = True


@dataclass(frozen=True)
class Step:
    """One call of a layer.

    Attributes:
        name: of the layer, with those of the models around it inside the model: "mobilenet/conv1".
        seconds: what its forward pass takes, roughly (`kerasmem.estimation.graph.costs`); only ratios count.
        working_bytes: what is in memory beside what is kept while it is computed, or its gradient, whichever is more:
            what that works on, the kernels' scratch, the gradients that wait for steps before it, and its weights'
            gradients with their update, which follows.
        kept: its tensors that outlive it.
        may_end: whether a segment may end after it; not if the layer is called again later.
    """

    name: str
    seconds: float
    working_bytes: int
    kept: tuple[Kept, ...]
    may_end: bool = True


def nested_models(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Return for each model inside the model how many steps lie before it, and before its end.

    Examples:
        >>> nested_models([Step(name, 1.0, 0, ()) for name in ("scale", "net/conv", "net/block/conv", "head")])
        [(1, 3), (2, 3)]
    """
    found: dict[str, tuple[int, int]] = {}
    for number, each in enumerate(steps):
        names = each.name.split("/")
        for depth in range(1, len(names)):
            begin, _ = found.setdefault("/".join(names[:depth]), (number, 0))
            found["/".join(names[:depth])] = (begin, number + 1)
    return list(found.values())
