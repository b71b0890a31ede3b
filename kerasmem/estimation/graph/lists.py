"""Tensor lists followed to what is in them, and shapes that only then are known. Pure Python.

A loop's forward pass pushes what the backward pass needs onto lists, and the backward pass pops it. In a program
without control flow it is known which is which: the operation that takes a tensor out of a list gets it as an input of
its own, so that it lives from where it was made to where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kerasmem.estimation.graph.program import Node, NotModelled, Program, Tensor
from kerasmem.estimation.graph.rules import ALIASES
from kerasmem.models.sizes import element_bytes

Shape = tuple[int, ...]
Infer = Callable[[Node, Sequence[Tensor], Sequence[Any]], "list[Shape | None] | None"]

_Source = tuple[int, int]
_Items = tuple[_Source | None, ...]


def settle(program: Program, infer: Infer) -> Program:
    """Return the program with the contents of lists as inputs and all shapes filled in.

    Args:
        program: without control flow, each node after those it takes from.
        infer: from a node, its inputs and their values where they are constants to the shapes of its outputs (None
            for one that depends on the data), or None where that is not known.

    Raises:
        NotModelled: a list's contents or a shape depend on the data.
    """
    if not any(_is_open(node) for node in program.nodes):
        return program
    nodes: list[Node] = []
    lists: dict[_Source, _Items | _Stack] = {}
    readers: dict[int, list[int]] = {}  # the node that made a list's rows → the nodes that read one
    for number, node in enumerate(program.nodes):
        settled = _with_lists(number, node, nodes, lists, readers)
        inputs = [nodes[source].outputs[output] for source, output in settled.inputs]
        nodes.append(_with_shapes(settled, inputs, nodes, infer))
    for maker, reading in readers.items():
        rows = tuple((maker, output) for output in range(1, len(nodes[maker].outputs)))
        last = nodes[reading[-1]]
        nodes[reading[-1]] = replace(last, inputs=(*last.inputs, *rows))
    return replace(program, nodes=tuple(nodes))


class _Stack:
    """A list that grows and shrinks at its end; the rest is shared with the lists it was made from."""

    __slots__ = ("rest", "top")

    def __init__(self, top: _Source, rest: _Stack | None) -> None:
        self.top, self.rest = top, rest


_EMPTY = _Stack((-1, 0), None)


def _is_open(node: Node) -> bool:
    return node.type.startswith("TensorList") or any(
        each.bytes is None and each.dtype != "variant" for each in node.outputs
    )


def _with_lists(
    number: int, node: Node, nodes: Sequence[Node], lists: dict[_Source, _Items | _Stack],
    readers: dict[int, list[int]],
) -> Node:  # fmt: skip
    """Note what lists a node makes; return it with what it takes out of one as a further input."""
    kind, here = node.type, (number, 0)
    source = node.inputs[0] if node.inputs else None
    if kind in ("EmptyTensorList", "TensorListReserve"):
        lists[here] = _EMPTY if kind == "EmptyTensorList" else ()
    elif kind == "TensorListPushBack":
        below = lists.get(node.inputs[0])
        lists[here] = _Stack(node.inputs[1], below if isinstance(below, _Stack) else None)
    elif kind == "TensorListPopBack":
        stack = lists.get(node.inputs[0])
        if not isinstance(stack, _Stack) or stack.top[0] < 0 or stack.rest is None:
            raise NotModelled(f"what {node.name} takes from its list is not known")
        lists[here] = stack.rest
        return replace(node, inputs=(*node.inputs, stack.top))
    elif kind == "TensorListSetItem":
        items, place = lists.get(node.inputs[0], ()), _number(node.inputs[1], nodes)
        known = items if isinstance(items, tuple) else ()
        if place is None:
            place = len(known)
        known = known + (None,) * (place + 1 - len(known))
        lists[here] = (*known[:place], node.inputs[2], *known[place + 1 :])
    elif kind == "TensorListFromTensor":
        whole = nodes[node.inputs[0][0]].outputs[node.inputs[0][1]]
        if whole.shape is None or not whole.shape:
            raise NotModelled(f"how many rows {node.name} has depends on the data")
        row = Tensor(whole.shape[1:], whole.dtype, (whole.bytes or 0) // max(whole.shape[0], 1))
        lists[here] = tuple((number, 1 + index) for index in range(whole.shape[0]))
        readers[number] = []
        return replace(node, outputs=(node.outputs[0], *[row] * whole.shape[0]))
    elif kind in ("TensorListGetItem", "TensorListStack"):
        items = lists.get(node.inputs[0], ())
        known = items if isinstance(items, tuple) else ()
        if kind == "TensorListStack":
            return replace(node, inputs=(*node.inputs, *(each for each in known if each is not None)))
        rows = next((each for each in known if each is not None), None)
        if rows is not None and rows[0] in readers:
            # Which row is read at which time matters little: they are as large and all stay until the last was read.
            reading = readers[rows[0]]
            read = known[min(len(reading), len(known) - 1)]
            reading.append(number)
            return replace(node, inputs=(*node.inputs, read or rows))
        if rows is not None:
            return replace(node, inputs=(*node.inputs, rows))
    elif source in lists and (kind in ALIASES or kind in ("ZerosLike", "AddN")):
        lists[here] = lists[source]
    return node


def _number(source: _Source, nodes: Sequence[Node]) -> int | None:
    value = nodes[source[0]].attributes.get("value")
    return None if value is None or value.size != 1 else int(value.reshape(()))


def _with_shapes(node: Node, inputs: Sequence[Tensor], nodes: Sequence[Node], infer: Infer) -> Node:
    if not any(each.bytes is None and each.dtype != "variant" for each in node.outputs):
        return node
    shapes = _of_list(node, inputs)
    if shapes is None and all(each.shape is not None or each.dtype in ("variant", "resource") for each in inputs):
        shapes = infer(node, inputs, [nodes[source].attributes.get("value") for source, _ in node.inputs])
    if shapes is None:
        return node
    outputs = tuple(
        Tensor(shape, each.dtype, math.prod(shape) * element_bytes(each.dtype))
        if each.bytes is None and each.dtype != "variant" and shape is not None
        else each
        for each, shape in zip(node.outputs, shapes, strict=True)
    )
    return replace(node, outputs=outputs)


def _of_list(node: Node, inputs: Sequence[Tensor]) -> list[Shape | None] | None:
    """Return the shapes of what comes out of a list, by what went in."""
    kind = node.type
    if kind == "TensorListPopBack":
        return [None, inputs[-1].shape]
    if kind == "TensorListGetItem" and len(inputs) > 3:
        return [inputs[3].shape]
    if kind == "TensorListElementShape":
        return [(1,)]
    if kind == "TensorListStack" and len(inputs) > 2 and inputs[2].shape is not None:
        return [(len(inputs) - 2, *inputs[2].shape)]
    return None
