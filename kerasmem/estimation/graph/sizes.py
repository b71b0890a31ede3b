"""One step at many batch sizes: between two sizes at which it was traced and is the same, it need not be traced. Pure.

Tracing and Grappler take most of an estimate's time, and a search asks for one size after another. Two programs are
alike where they hold the same operations, and each dimension of each tensor is the same in both, or so many for each
sample. The program at a size between them follows from both: what TensorFlow does otherwise as a batch grows (a
constant is too large to be folded, an input to be fed) it does from some size on, and the larger one shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.estimation.graph.program import Node, Program, Tensor

_FURTHER = 16  # times the size that is asked for: about as far as a search goes in one step
_NEARER = 32  # parts of the size that is asked for: one part less is about as far as a search comes back
_FURTHEST = 2**20
_VALUE = "value"  # the attribute of constants; of those in a program the axis of a split alone is looked at


@dataclass(frozen=True)
class SizedStep:
    """A step at a batch size, ready to be simulated.

    Attributes:
        program: the step.
        variables: those behind the program's, in their order.
        scopes: name scope → the layers whose calls opened it, the outermost first.
        optimizers: their names.
        notes: on how it was traced.
    """

    program: Program
    variables: tuple[Any, ...]
    scopes: Mapping[str, tuple[str, ...]]
    optimizers: tuple[str, ...]
    notes: tuple[str, ...]


class KnownSizes:
    """A step at the batch sizes at which it was traced."""

    def __init__(self) -> None:
        self._known: dict[int, SizedStep] = {}
        self._compared: dict[tuple[int, int], bool] = {}
        self._looks_ahead = True

    def at(self, size: int, trace: Callable[[int], SizedStep]) -> SizedStep:
        """Return the step at a size: as it follows from two others, or traced.

        From the third size on it is traced further ahead first, which serves what a search asks next, and where the
        step became another one since the size before, a little below. The size ahead is odd and the one below a
        multiple of a power of two, so that what depends on a multiple shows. Where that was of no use, it is not tried
        again.

        Args:
            size: samples in a batch.
            trace: traces it at a size.
        """
        step = self._between(size)
        if step is None and self._looks_ahead and len(self._known) > 1 and size > max(self._known):
            self._look(min(_FURTHER * size, _FURTHEST) + 1, trace)
            step = self._between(size)
        if step is None and self._looks_ahead and len(self._known) > 2:
            self._look(_round(size - size // _NEARER), trace)
            step = self._between(size)
        if step is None:
            step = self._known[size] = trace(size)
            larger = [each for each in self._known if each > size]
            self._looks_ahead &= not larger or self._are_alike(size, min(larger))
        return step

    def _look(self, size: int, trace: Callable[[int], SizedStep]) -> None:
        try:
            self._known[size] = trace(size)
        except Exception:  # nobody asked for this size, so it says nothing
            self._looks_ahead = False

    def _between(self, size: int) -> SizedStep | None:
        if size in self._known:
            return self._known[size]
        below = max((each for each in self._known if each < size), default=None)
        above = min((each for each in self._known if each > size), default=None)
        if below is None or above is None or not self._are_alike(below, above):
            return None
        return _between(self._known[below], self._known[above], below, size)

    def _are_alike(self, small: int, large: int) -> bool:
        if (small, large) not in self._compared:
            self._compared[small, large] = _alike(self._known[small], self._known[large], small, large)
        return self._compared[small, large]


def _round(size: int) -> int:
    """Return the next smaller multiple of as large a power of two as changes a size little."""
    unit = 1 << max((size // _NEARER).bit_length() - 1, 0)
    return size // unit * unit


def _alike(one: SizedStep, other: SizedStep, small: int, large: int) -> bool:
    """Return whether two steps are the same but for the batch size."""
    first, second = one.program, other.program
    if (one.scopes, one.optimizers, one.notes) != (other.scopes, other.optimizers, other.notes):
        return False
    if list(map(id, one.variables)) != list(map(id, other.variables)):
        return False
    if replace(first, nodes=()) != replace(second, nodes=()) or len(first.nodes) != len(second.nodes):
        return False
    axes = {node.inputs[0][0] for node in first.nodes if node.type == "Split"}
    return all(
        _plain(node) == _plain(at_large)
        and (number not in axes or _same_value(node, at_large))
        and len(node.outputs) == len(at_large.outputs)
        and all(
            _grown(tensor, grown, small, large) == grown
            for tensor, grown in zip(node.outputs, at_large.outputs, strict=True)
        )
        for number, (node, at_large) in enumerate(zip(first.nodes, second.nodes, strict=True))
    )


def _plain(node: Node) -> Node:
    """Return what does not depend on the batch size: neither outputs nor constants, such as the number of samples.

    Operations that others wait for come in no order.
    """
    attributes = {name: value for name, value in node.attributes.items() if name != _VALUE}
    return replace(node, controls=tuple(sorted(node.controls)), outputs=(), attributes=attributes)


def _same_value(one: Node, other: Node) -> bool:
    first, second = one.attributes.get(_VALUE), other.attributes.get(_VALUE)
    if first is None or second is None:
        return first is second
    return bool(first.shape == second.shape and first.tobytes() == second.tobytes())


def _grown(tensor: Tensor, other: Tensor, small: int, size: int) -> Tensor:
    """Return a tensor of a small batch at another size; `other` is the same one at a third, which shows what grows."""
    if tensor == other or not tensor.bytes or not tensor.shape or len(tensor.shape) != len(other.shape or ()):
        return tensor
    pairs = zip(tensor.shape, other.shape or (), strict=True)
    shape = tuple(one if one == another or one % small else one // small * size for one, another in pairs)
    return replace(tensor, shape=shape, bytes=tensor.bytes // math.prod(tensor.shape) * math.prod(shape))


def _between(one: SizedStep, other: SizedStep, small: int, size: int) -> SizedStep:
    """Return the step at a size between those of two that are alike, of which the first has the small batch."""
    nodes = []
    for node, at_large in zip(one.program.nodes, other.program.nodes, strict=True):
        outputs = tuple(
            _grown(tensor, grown, small, size) for tensor, grown in zip(node.outputs, at_large.outputs, strict=True)
        )
        same = outputs == node.outputs and _same_value(node, at_large)
        nodes.append(node if same else replace(_plain(node), outputs=outputs))
    return replace(one, program=replace(one.program, nodes=tuple(nodes)))
