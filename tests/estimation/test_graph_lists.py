"""Tensor lists: what goes in comes out, and with it the shapes."""

from __future__ import annotations

import numpy as np
import pytest

from kerasmem.estimation.graph.lists import resolve_lists
from kerasmem.estimation.graph.program import Node, NotModelled, Program, Tensor

OPEN, LIST = Tensor(None, "float32", None), Tensor(None, "variant", 0)


def unknown(node, inputs, values):
    """TensorFlow's inference, where it has nothing to say."""


def tensor(*shape):
    return Tensor(shape, "float32", 4 * int(np.prod(shape)))


def resolve(*nodes):
    """Settle a program whose nodes are (name, type, inputs by name, output, constant)."""
    number = {node[0]: place for place, node in enumerate(nodes)}
    made = [
        Node(
            name, kind, tuple((number[item], 0) for item in inputs), (), (output,),
            {} if value is None else {"value": np.array(value)},
        )
        for name, kind, inputs, output, value in ((*node, None)[:5] for node in nodes)
    ]  # fmt: skip
    resolved = resolve_lists(Program(tuple(made), (), (), ()), unknown)
    names = list(number)
    return {
        node.name: (
            [(names[source], output) for source, output in node.inputs], [item.shape for item in node.outputs], node,
        )
        for node in resolved.nodes
    }  # fmt: skip


def test_without_lists_and_open_shapes_nothing_changes():
    program = Program((Node("x", "Relu", (), (), (tensor(3),), {}),), (), (), ())
    assert resolve_lists(program, unknown) is program


def pop(count):
    two = [LIST, OPEN]
    return [
        Node("a", "Placeholder", (), (), (tensor(2, 3),), {}),
        Node("b", "Placeholder", (), (), (tensor(5),), {}),
        Node("shape", "Const", (), (), (Tensor((0,), "int32", 0),), {}),
        Node("l0", "EmptyTensorList", ((2, 0),), (), (LIST,), {}),
        Node("l1", "TensorListPushBack", ((3, 0), (0, 0)), (), (LIST,), {}),
        Node("l2", "TensorListPushBack", ((4, 0), (1, 0)), (), (LIST,), {}),
        Node("p1", "TensorListPopBack", ((5, 0), (2, 0)), (), tuple(two), {}),
        Node("p2", "TensorListPopBack", ((6, 0), (2, 0)), (), tuple(two), {}),
        Node("p3", "TensorListPopBack", ((7, 0), (2, 0)), (), tuple(two), {}),
    ][:count]


def test_popped_items_have_shapes():
    resolved = resolve_lists(Program(tuple(pop(8)), (), (), ()), unknown).nodes
    assert [resolved[number].inputs[-1] for number in (6, 7)] == [(1, 0), (0, 0)]
    assert [resolved[number].outputs[1].shape for number in (6, 7)] == [(5,), (2, 3)]
    assert [resolved[number].outputs[1].bytes for number in (6, 7)] == [20, 24]
    with pytest.raises(NotModelled, match="item of p3"):
        resolve_lists(Program(tuple(pop(9)), (), (), ()), unknown)


def test_rows_of_a_tensor():
    resolved = resolve(
        ("x", "Placeholder", [], tensor(3, 4, 2)),
        ("shape", "Const", [], Tensor((0,), "int32", 0)),
        ("l", "TensorListFromTensor", ["x", "shape"], LIST),
        ("i0", "Const", [], Tensor((), "int32", 4), 0),
        ("g0", "TensorListGetItem", ["l", "i0", "shape"], OPEN),
        ("g1", "TensorListGetItem", ["l", "i0", "shape"], OPEN),
    )
    assert resolved["l"][1][1:] == [(4, 2)] * 3
    assert resolved["g0"][1] == resolved["g1"][1] == [(4, 2)]
    assert resolved["g0"][2].outputs[0].bytes == 32
    assert resolved["g0"][0][3] != resolved["g1"][0][3], "each reads a row of its own"
    # All rows are one buffer's: they stay until the last was read.
    assert {item for item in resolved["g1"][0] if item[0] == "l"} == {("l", 0), ("l", 1), ("l", 2), ("l", 3)}


def test_shapes_left_open_are_inferred_from_inputs_and_constants():
    asked = []

    def infer(node, inputs, values):
        asked.append((node.name, [item.shape for item in inputs], [None if v is None else v.tolist() for v in values]))
        return [(4, 7), None] if node.name == "y" else None

    nodes = (
        Node("x", "Placeholder", (), (), (tensor(4, 3),), {}),
        Node("axis", "Const", (), (), (Tensor((), "int32", 4),), {"value": np.array(1)}),
        Node("y", "Op", ((0, 0), (1, 0)), (), (OPEN, OPEN), {}),
        Node("z", "Op", ((2, 0),), (), (OPEN,), {}),
        Node("w", "Op", ((2, 1),), (), (OPEN,), {}),
    )
    resolved = resolve_lists(Program(nodes, (), (), ()), infer).nodes
    assert resolved[2].outputs == (tensor(4, 7), OPEN)
    assert resolved[3].outputs == resolved[4].outputs == (OPEN,)
    # Nothing is asked about an operation one of whose inputs is open itself.
    assert asked == [("y", [(4, 3), ()], [None, 1]), ("z", [(4, 7)], [None])]


def test_gradient_rows_live_until_their_last_use():
    """A loop's gradient: rows of zeros, and at each iteration a list with one row is added to them."""
    resolved = resolve(
        ("a", "Placeholder", [], tensor(2, 3)),
        ("whole", "Placeholder", [], tensor(2, 3)),
        ("shape", "Const", [], Tensor((1,), "int32", 4)),
        ("at", "Placeholder", [], Tensor((), "int32", 4)),
        ("forward", "TensorListFromTensor", ["whole", "shape"], LIST),
        ("zeros", "ZerosLike", ["forward"], LIST),
        ("empty", "TensorListReserve", ["shape", "at"], LIST),
        ("one", "TensorListSetItem", ["empty", "at", "a"], LIST),
        ("sum", "AddN", ["one", "zeros"], LIST),
        ("stacked", "TensorListStack", ["sum", "shape"], OPEN),
    )
    assert resolved["zeros"][1] == [None, (3,), (3,)]
    assert [item for item in resolved["zeros"][0] if item[0] == "forward"] == [("forward", place) for place in range(3)]
    assert resolved["sum"][1][1:] == [(2, 3)]  # as large as what was added to the first row
    assert ("a", 0) in resolved["sum"][0] and ("zeros", 1) in resolved["sum"][0]
    assert resolved["stacked"][0][-2:] == [("sum", 1), ("zeros", 2)]


def test_an_item_lives_until_another_takes_its_place():
    resolved = resolve(
        ("a", "Placeholder", [], tensor(3)),
        ("b", "Placeholder", [], tensor(3)),
        ("shape", "Const", [], Tensor((1,), "int32", 4)),
        ("zero", "Const", [], Tensor((), "int32", 4), 0),
        ("l0", "TensorListReserve", ["shape", "zero"], LIST),
        ("l1", "TensorListSetItem", ["l0", "zero", "a"], LIST),
        ("l2", "TensorListSetItem", ["l1", "zero", "b"], LIST),
        ("stacked", "TensorListStack", ["l2", "shape"], OPEN),
    )
    assert resolved["l2"][0][-1] == ("a", 0)
    assert resolved["stacked"][0] == [("l2", 0), ("shape", 0), ("b", 0)]


@pytest.mark.parametrize(("reader", "shape"), [("row", (7, 4)), ("rows", (2, 2))])
def test_a_shape_follows_from_the_values_of_rows(reader, shape):
    """TensorFlow's own operation has no rows to evaluate, only the list."""

    def infer(node, inputs, values):
        if node.type != "Op":
            return None
        return [tuple(values[0]) if reader == "row" else values[0].shape]

    def evaluate(node, output, inputs, values):
        raise AssertionError(f"{node.name} cannot be evaluated apart from its list")

    scalar, unknown_row = Tensor((), "int32", 4), Tensor(None, "int32", None)
    nodes = (
        Node("whole", "Const", (), (), (Tensor((2, 2), "int32", 16),), {"value": np.array([[5, 3], [7, 4]])}),
        Node("index", "Const", (), (), (scalar,), {"value": np.array(2)}),
        Node("list", "TensorListFromTensor", ((0, 0), (1, 0)), (), (LIST,), {}),
        Node("first", "TensorListGetItem", ((2, 0), (1, 0), (1, 0)), (), (unknown_row,), {}),
        Node("row", "TensorListGetItem", ((2, 0), (1, 0), (1, 0)), (), (unknown_row,), {}),
        Node("rows", "TensorListStack", ((2, 0), (1, 0)), (), (Tensor((2, 2), "int32", 16),), {}),
        Node("y", "Op", ((4 if reader == "row" else 5, 0),), (), (OPEN,), {}),
    )
    resolved = resolve_lists(Program(nodes, (), (), ()), infer, evaluate).nodes
    assert resolved[-1].outputs[0].shape == shape
