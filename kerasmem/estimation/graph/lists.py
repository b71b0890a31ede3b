"""Resolution of tensor lists to their items and shapes.

A loop's forward pass pushes tensors onto lists, and the backward pass pops them. In a program without control flow the
items are known: an operation that takes an item from a list gets it as a further input, so that the item lives until
then.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kerasmem.estimation.graph.program import Node, NotModelled, Program, Tensor
from kerasmem.estimation.graph.rules import ALIASES, TAKEN_FROM_LIST
from kerasmem.models.sizes import element_bytes

MOST_ELEMENTS, DEEPEST = 4096, 40  # limits of a value that a shape depends on: its elements, operations that lead to it

Shape = tuple[int, ...]
Infer = Callable[[Node, Sequence[Tensor], Sequence[Any]], "list[Shape | None] | None"]
Evaluate = Callable[[Node, int, Sequence[Tensor], Sequence[Any]], Any]

_Source = tuple[int, int]
_Items = tuple[_Source | None, ...]


def resolve_lists(program: Program, infer: Infer, evaluate: Evaluate = lambda *_: None) -> Program:
    """Add list items as inputs, and infer the shapes that depend on them.

    Args:
        program: a program without control flow, in which each node follows its inputs.
        infer: returns the shapes of a node's outputs from its inputs and their values, or None if unknown. A shape is
            None if it depends on the data.
        evaluate: returns the value of a node's output, or None if it depends on the data. It is called only for values
            that a shape depends on. Defaults to None for any output.

    Raises:
        NotModelled: If a list's contents depend on the data.
    """
    if not any(_is_open(node) for node in program.nodes):
        return program
    nodes: list[Node] = []
    lists = _Lists()
    values = _Values(nodes, evaluate)
    for number, node in enumerate(program.nodes):
        resolved = _with_lists(number, node, nodes, lists)
        inputs = [nodes[source].outputs[output] for source, output in resolved.inputs]
        nodes.append(_with_shapes(resolved, inputs, values, infer))
    for number, items in lists.last_holders():
        nodes[number] = replace(nodes[number], inputs=(*nodes[number].inputs, *items))
    return replace(program, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """A list that changes only at its end, and shares the rest with other lists."""

    top: _Source
    rest: _Stack | None


_EMPTY = _Stack((-1, 0), None)


class _Lists:
    """Contents and uses of a program's lists, by the output that holds them."""

    def __init__(self) -> None:
        self.contents: dict[_Source, _Items | _Stack] = {}
        self.origin: dict[_Source, _Source] = {}  # the first list that a list derives from
        self.written: Counter[_Source] = Counter()  # by origin
        self.read: Counter[_Source] = Counter()
        self._last_user: dict[_Source, int] = {}  # by list
        self._is_continued: set[_Source] = set()  # lists that others derive from

    def items(self, source: _Source) -> _Items:
        """Return the items of an indexed list, or () for a stack."""
        contents = self.contents.get(source, ())
        return contents if isinstance(contents, tuple) else ()

    def record_use(self, number: int, source: _Source, result: _Source | None = None) -> _Source:
        """Record an operation's input and output list, and return the origin."""
        origin = self.origin.get(source, source)
        self._last_user[source] = number
        if result is not None:
            self.origin.setdefault(result, origin)
            self._is_continued.add(source)
        return origin

    def last_holders(self) -> Iterator[tuple[int, list[_Source]]]:
        """Yield the last operation on each final list, and the list's items."""
        for source, number in self._last_user.items():
            items = [item for item in self.items(source) if item is not None]
            if source not in self._is_continued and items:
                yield number, items


def _is_open(node: Node) -> bool:
    return node.type.startswith("TensorList") or any(map(_is_unknown, node.outputs))


def _with_lists(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    """Record a node's lists, and return it with items as further inputs.

    The index of a read or write is often unknown and matters little, since rows have one size. So the k-th read or
    write is assumed to be at index k.
    """
    rule = _LIST_RULES.get(node.type)
    if rule is not None:
        return rule(number, node, nodes, lists)
    source = node.inputs[0] if node.inputs else None
    contents = lists.contents
    if node.type == "ZerosLike" and source is not None and lists.items(source):
        lists.record_use(number, source)
        rows = [nodes[item[0]].outputs[item[1]] for item in lists.items(source) if item is not None]
        return _with_rows(number, node, rows, lists)
    if node.type == "AddN" and node.inputs and all(isinstance(contents.get(end), tuple) for end in node.inputs):
        return _with_sums(number, node, nodes, lists)
    if source in contents and (node.type in ALIASES or node.type in ("ZerosLike", "AddN")):
        contents[number, 0] = contents[source]
        lists.record_use(number, source, (number, 0))
    return node


def _create(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    lists.contents[number, 0] = _EMPTY if node.type == "EmptyTensorList" else ()
    return node


def _push(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    below = lists.contents.get(node.inputs[0])
    lists.contents[number, 0] = _Stack(node.inputs[1], below if isinstance(below, _Stack) else None)
    return node


def _pop(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    stack = lists.contents.get(node.inputs[0])
    if not isinstance(stack, _Stack) or stack.top[0] < 0 or stack.rest is None:
        raise NotModelled(f"the list item of {node.name} is unknown")
    lists.contents[number, 0] = stack.rest
    if stack.top in lists.contents:  # a list of an inner loop on a list of an outer loop
        lists.contents[number, 1] = lists.contents[stack.top]
    return replace(node, inputs=(*node.inputs, stack.top))


def _split_into_rows(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    whole = nodes[node.inputs[0][0]].outputs[node.inputs[0][1]]
    if whole.shape is None or not whole.shape:
        raise NotModelled(f"the number of rows of {node.name} depends on the data")
    row = Tensor(whole.shape[1:], whole.dtype, (whole.bytes or 0) // max(whole.shape[0], 1))
    return _with_rows(number, node, [row] * whole.shape[0], lists)


def _read(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    items, origin = lists.items(node.inputs[0]), lists.record_use(number, node.inputs[0])
    item = items[min(lists.read[origin], len(items) - 1)] if items else None
    lists.read[origin] += 1
    item = item or next((other for other in items if other is not None), None)
    return node if item is None else replace(node, inputs=(*node.inputs, item))


def _stack(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    items = lists.items(node.inputs[0])
    return replace(node, inputs=(*node.inputs, *(item for item in items if item is not None)))


def _with_rows(number: int, node: Node, rows: Sequence[Tensor], lists: _Lists) -> Node:
    """Return a node that makes a list, with its rows as outputs."""
    lists.contents[number, 0] = tuple((number, 1 + index) for index in range(len(rows)))
    return replace(node, outputs=(node.outputs[0], *rows))


def _write(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    """Return a node that writes an item and reads the old one."""
    result, items = (number, 0), lists.items(node.inputs[0])
    origin = lists.record_use(number, node.inputs[0], result)
    index = _number(node.inputs[1], nodes)
    if index is None:
        index = lists.written[origin]
    lists.written[origin] += 1
    items += (None,) * (index + 1 - len(items))
    lists.contents[result] = (*items[:index], node.inputs[2], *items[index + 1 :])
    before = items[index]
    return node if before is None else replace(node, inputs=(*node.inputs, before))


def _with_sums(number: int, node: Node, nodes: Sequence[Node], lists: _Lists) -> Node:
    """Return a node that adds lists, with a new row for each common index."""
    result = (number, 0)
    rows: list[Tensor] = []
    items: list[_Source | None] = []
    added: list[_Source] = []
    for row in itertools.zip_longest(*map(lists.items, node.inputs)):
        existing = [item for item in row if item is not None]
        if len(existing) > 1:
            added += existing
            rows.append(nodes[existing[0][0]].outputs[existing[0][1]])
            items.append((number, len(rows)))
        else:
            items.append(existing[0] if existing else None)
    for source in node.inputs:
        lists.record_use(number, source, result)
    lists.contents[result] = tuple(items)
    return replace(node, inputs=(*node.inputs, *added), outputs=(node.outputs[0], *rows))


_LIST_RULES: dict[str, Callable[[int, Node, Sequence[Node], _Lists], Node]] = {
    "EmptyTensorList": _create,
    "TensorListReserve": _create,
    "TensorListPushBack": _push,
    "TensorListPopBack": _pop,
    "TensorListSetItem": _write,
    "TensorListFromTensor": _split_into_rows,
    "TensorListGetItem": _read,
    "TensorListStack": _stack,
}


def _number(source: _Source, nodes: Sequence[Node]) -> int | None:
    value = nodes[source[0]].attributes.get("value")
    return None if value is None or value.size != 1 else int(value.reshape(()))


class _Values:
    """Values of small tensors that a shape depends on."""

    def __init__(self, nodes: Sequence[Node], evaluate: Evaluate) -> None:
        self._nodes, self._evaluate = nodes, evaluate
        self._cache: dict[_Source, Any] = {}

    def of(self, source: _Source, depth: int = 0) -> Any:
        """Return the value of an output, or None if unknown or behind too many operations."""
        node = self._nodes[source[0]]
        if node.type == "Const":
            return node.attributes.get("value")
        if source not in self._cache:
            self._cache[source] = self._compute(node, source[1], depth) if depth < DEEPEST else None
        return self._cache[source]

    def _compute(self, node: Node, output: int, depth: int) -> Any:
        tensor = node.outputs[output]
        if tensor.dtype not in ("int32", "int64", "bool") or math.prod(tensor.shape or ()) > MOST_ELEMENTS:
            return None
        if node.type in TAKEN_FROM_LIST and len(node.inputs) > TAKEN_FROM_LIST[node.type]:
            return self.of(node.inputs[TAKEN_FROM_LIST[node.type]], depth + 1)
        if node.type == "TensorListFromTensor":  # its outputs after the list are the tensor's rows
            whole = self.of(node.inputs[0], depth + 1)
            return None if whole is None else whole[output - 1]
        if node.type == "TensorListStack":
            rows = [self.of(row, depth + 1) for row in node.inputs[2:]]
            return None if not rows or any(row is None for row in rows) else np.stack(rows)
        inputs = [self._nodes[source].outputs[index] for source, index in node.inputs]
        if node.type in ("Shape", "ShapeN"):
            shape = inputs[output].shape
            return None if shape is None else np.array(shape, tensor.dtype)
        values = [self.of(source, depth + 1) for source in node.inputs]
        known_values = [value for value in values if value is not None]
        if node.type == "Minimum" and len(known_values) == 1:  # the other depends on the data (`tf.math.bincount`)
            return known_values[0]
        return self.evaluate(node, output, inputs, values)

    def evaluate(self, node: Node, output: int, inputs: Sequence[Tensor], values: Sequence[Any]) -> Any:
        """Evaluate an output, or return None if an input is unknown."""
        if not values or any(value is None for value in values):
            return None
        return self._evaluate(node, output, inputs, values)


def _with_shapes(node: Node, inputs: Sequence[Tensor], values: _Values, infer: Infer) -> Node:
    if not any(map(_is_unknown, node.outputs)):
        return node
    shapes, input_values = _item_shapes(node, inputs), []
    if shapes is None and all(tensor.shape is not None or tensor.dtype in ("variant", "resource") for tensor in inputs):
        input_values = [values.of(source) for source in node.inputs]
        shapes = infer(node, inputs, input_values)
    if shapes is None:
        return node
    outputs = list(node.outputs)
    for index, (tensor, shape) in enumerate(zip(node.outputs, shapes, strict=False)):  # a list's rows come after them
        if not _is_unknown(tensor):
            continue
        if shape is None:  # the value, and so its length, may follow from the inputs' values
            value = values.evaluate(node, index, inputs, input_values)
            shape = None if value is None else value.shape
        if shape is not None:
            outputs[index] = Tensor(shape, tensor.dtype, math.prod(shape) * element_bytes(tensor.dtype))
    return replace(node, outputs=tuple(outputs))


def _is_unknown(tensor: Tensor) -> bool:
    return tensor.bytes is None and tensor.dtype != "variant"


def _item_shapes(node: Node, inputs: Sequence[Tensor]) -> list[Shape | None] | None:
    """Return the output shapes of an operation on list items, or None."""
    kind = node.type
    if kind == "LookupTableFindV2" and len(inputs) > 2 and inputs[2].shape == ():
        return [inputs[1].shape]
    if kind == "TensorListPopBack":
        return [None, inputs[-1].shape]
    if kind == "TensorListGetItem" and len(inputs) > 3:
        return [inputs[3].shape]
    if kind == "TensorListElementShape":
        return [(1,)]
    if kind == "TensorListStack" and len(inputs) > 2 and inputs[2].shape is not None:
        return [(len(inputs) - 2, *inputs[2].shape)]
    return None
