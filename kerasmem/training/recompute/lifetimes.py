"""The memory of a graph's tensors: when they live, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from kerasmem.estimation.graph.program import tensor_of
from kerasmem.estimation.graph.rules import ALIASES, FORWARDS, NOTHING
from kerasmem.models.backend import import_keras
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import target_spec

# They look at a tensor's shape and not at its values.
SHAPE_ONLY = frozenset(("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "VariableShape"))
MAKE_NOTHING = NOTHING | ALIASES


def lifetimes(
    operations: Sequence[Any],
    needed: Set[str],
    until: Mapping[Any, int],
    begin: int = 0,
    scratch: Callable[[Any], int] = lambda _: 0,
    apart: Set[Any] = frozenset(),
) -> list[int]:
    """Return how many bytes are alive while each operation runs, in their order, of those that they make.

    Args:
        operations: one after another.
        needed: names of those that run.
        until: what is held longer than operations need it: tensor → the place of the last operation beside which.
        begin: the place of the first operation.
        scratch: operation → the bytes that it works in.
        apart: tensors that do not count.
    """
    place = {each.name: number for number, each in enumerate(operations, begin)}
    last = dict(until)
    for number, operation in enumerate(operations, begin):
        if operation.name in needed and operation.type not in ALIASES and operation.type not in SHAPE_ONLY:
            for each in operation.inputs:
                last[root_of(each).ref()] = max(number, last.get(root_of(each).ref(), 0))
    lives: list[int] = []
    leaving: dict[int, int] = {}
    live = 0
    for number, operation in enumerate(operations, begin):
        makes = operation.name in needed and (operation.type == "Placeholder" or operation.type not in MAKE_NOTHING)
        for each in (one for one in operation.outputs if makes and one.ref() not in apart):
            live += bytes_of(each)
            end = last.get(each.ref(), number)
            leaving[end] = leaving.get(end, 0) + bytes_of(each)
        dying = [each for each in map(root_of, operation.inputs) if last.get(each.ref()) == number]
        own = {bytes_of(each) for each in dying if each.op.name in place}
        lives.append(live - (_taken_over(operation, own) if makes else 0) + (scratch(operation) if makes else 0))
        live -= leaving.pop(number, 0)
    return lives


def _taken_over(operation: Any, sizes: Set[int]) -> int:
    """Return the bytes that an operation puts out in an input's place, given the sizes of those that end with it."""
    if operation.type in FORWARDS and bytes_of(operation.outputs[0]) in sizes:
        return bytes_of(operation.outputs[0])
    if operation.type == "SparseSoftmaxCrossEntropyWithLogits" and bytes_of(operation.outputs[1]) in sizes:
        return bytes_of(operation.outputs[1])
    return 0


def loss_bytes(loss: Any, outputs: Sequence[Any]) -> int:
    """Return the working bytes of a loss and its gradient, outputs included.

    Where its targets cannot be known from the outputs, those and their gradients.
    """
    import tensorflow as tf

    keras = import_keras()
    least = 2 * sum(bytes_of(each) for each in outputs if hasattr(each, "op"))
    if len(outputs) != 1 or not (isinstance(loss, str) or callable(loss)):
        return least
    function = keras.losses.get(loss)

    def both_passes(output: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(output)
            is_wrapped = isinstance(function, keras.losses.Loss)
            value = function(target, output if is_wrapped else tf.cast(output, "float32"))
        return tape.gradient(value, output)

    output = keras.KerasTensor(outputs[0].shape, outputs[0].dtype.name)
    (target,) = keras.tree.flatten(target_spec(loss, output, output.shape[0]))
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in (output, target)]
    try:
        graph = tf.function(both_passes, autograph=False).get_concrete_function(*specs).graph
    except Exception:  # it takes other targets
        return least
    made, needed = graph.get_operations(), needed_for(graph.outputs)
    given = graph.inputs[1]  # with the batch
    return max(lifetimes(made, needed, {given.ref(): len(made) - 1})) - bytes_of(given)


def in_order(operations: Sequence[Any], begin: int = 0) -> list[Any]:
    """Return the operations of a graph so that each comes after those it waits for, and else in the order given.

    Args:
        operations: in the order in which they were made.
        begin: the place of the first that may move.
    """
    found = {each.name: each for each in operations[:begin]}
    for operation in operations[begin:]:
        pending = [operation]
        while pending:
            one = pending[-1]
            awaited = [each for each in one.control_inputs if each.name not in found]
            awaited += [each.op for each in one.inputs if each.op.name not in found]
            pending += awaited
            if not awaited:
                found[pending.pop().name] = one
    return list(found.values())


def needed_for(tensors: Iterable[Any]) -> set[str]:
    """Return the names of the operations that tensors depend on."""
    found: set[str] = set()
    pending = [each.op for each in tensors]
    while pending:
        operation = pending.pop()
        if operation.name not in found:
            found.add(operation.name)
            pending.extend((*(each.op for each in operation.inputs), *operation.control_inputs))
    return found


def root_of(tensor: Any) -> Any:
    """Return the tensor that first filled the buffer."""
    while tensor.op.type in ALIASES and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def bytes_of(tensor: Any) -> int:
    """Return a tensor's bytes, or 0 if its shape is unknown."""
    return tensor_of(tensor).bytes or 0


def list_bytes(operation: Any, tensor: Any) -> int:
    """Return the final bytes of a tensor list: the size of an element times the turns of its loop."""
    import tensorflow as tf

    if operation.type == "TensorListFromTensor":
        return bytes_of(operation.inputs[0])
    number = tensor.value_index
    if operation.type not in ("While", "StatelessWhile") or number >= len(operation.inputs):
        return 0
    begun = operation.inputs[number].op
    if begun.type not in ("EmptyTensorList", "TensorListReserve"):
        return 0
    shape = tf.get_static_value(begun.inputs[0])
    sizes = [] if shape is None else [int(each) for each in shape.flat]
    if shape is None or any(each < 0 for each in sizes):
        return 0
    return _turns(operation) * math.prod(sizes) * element_bytes(begun.get_attr("element_dtype").name)


def _turns(loop: Any) -> int:
    """Return the number of turns of a loop over the steps of a sequence."""
    import tensorflow as tf

    counts = [1]
    for each in loop.inputs:
        if each.op.type == "TensorListFromTensor":
            counts.append(each.op.inputs[0].shape[0] or 1)
        elif each.op.type == "TensorListReserve":
            size = tf.get_static_value(each.op.inputs[1])
            counts.append(1 if size is None else int(size))
    return max(counts)
