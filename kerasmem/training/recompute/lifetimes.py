"""Lifetimes and sizes of the tensors of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from kerasmem.estimation.graph.program import tensor_of
from kerasmem.estimation.graph.rules import ALIASES, FORWARDS, NOTHING
from kerasmem.models.backend import import_keras
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import target_spec

# Operations that read a tensor's shape and not its values.
SHAPE_ONLY = frozenset(("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "VariableShape"))
MAKE_NOTHING = NOTHING | ALIASES


def lifetimes(
    operations: Sequence[Any],
    needed: Set[str],
    until: Mapping[Any, int],
    begin: int = 0,
    scratch: Callable[[Any], int] = lambda _: 0,
    excluded: Set[Any] = frozenset(),
) -> list[int]:
    """Return the bytes of the operations' live tensors while each operation runs, in their order.

    Args:
        operations: operations in the order of execution.
        needed: names of the operations that run.
        until: tensors that are held longer than operations need them → number of the last operation.
        begin: number of the first operation.
        scratch: function from an operation to the bytes of its scratch.
        excluded: tensors that do not count.
    """
    names = {operation.name for operation in operations}
    last = dict(until)
    for number, operation in enumerate(operations, begin):
        if operation.name in needed and operation.type not in ALIASES and operation.type not in SHAPE_ONLY:
            for tensor in operation.inputs:
                last[root_of(tensor).ref()] = max(number, last.get(root_of(tensor).ref(), 0))
    lives: list[int] = []
    leaving: dict[int, int] = {}
    live = 0
    for number, operation in enumerate(operations, begin):
        makes = operation.name in needed and (operation.type == "Placeholder" or operation.type not in MAKE_NOTHING)
        for tensor in (output for output in operation.outputs if makes and output.ref() not in excluded):
            live += bytes_of(tensor)
            end = last.get(tensor.ref(), number)
            leaving[end] = leaving.get(end, 0) + bytes_of(tensor)
        dying = [tensor for tensor in map(root_of, operation.inputs) if last.get(tensor.ref()) == number]
        own = {bytes_of(tensor) for tensor in dying if tensor.op.name in names}
        lives.append(live - (_reused_bytes(operation, own) if makes else 0) + (scratch(operation) if makes else 0))
        live -= leaving.pop(number, 0)
    return lives


def _reused_bytes(operation: Any, sizes: Set[int]) -> int:
    """Return the bytes of an output in the buffer of an input, given the sizes of inputs that end here."""
    if operation.type in FORWARDS and bytes_of(operation.outputs[0]) in sizes:
        return bytes_of(operation.outputs[0])
    if operation.type == "SparseSoftmaxCrossEntropyWithLogits" and bytes_of(operation.outputs[1]) in sizes:
        return bytes_of(operation.outputs[1])
    return 0


def loss_bytes(loss: Any, outputs: Sequence[Any]) -> int:
    """Return the bytes of a loss and its gradient, including the outputs.

    If the targets cannot be derived from the outputs, only outputs and their gradients count.
    """
    import tensorflow as tf

    keras = import_keras()
    least = 2 * sum(bytes_of(output) for output in outputs if hasattr(output, "op"))
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
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in (output, target)]
    try:
        graph = tf.function(both_passes, autograph=False).get_concrete_function(*specs).graph
    except Exception:  # the loss takes other targets
        return least
    operations, needed = graph.get_operations(), dependencies_of(graph.outputs)
    targets = graph.inputs[1]  # counted with the batch
    return max(lifetimes(operations, needed, {targets.ref(): len(operations) - 1})) - bytes_of(targets)


def in_order(operations: Sequence[Any], begin: int = 0) -> list[Any]:
    """Sort the operations of a graph so that each follows those that it waits for.

    Args:
        operations: operations in the order of creation, which the result keeps if possible.
        begin: number of the first operation that may move.
    """
    ordered = {operation.name: operation for operation in operations[:begin]}
    for operation in operations[begin:]:
        pending = [operation]
        while pending:
            current = pending[-1]
            awaited = [before for before in current.control_inputs if before.name not in ordered]
            awaited += [tensor.op for tensor in current.inputs if tensor.op.name not in ordered]
            pending += awaited
            if not awaited:
                ordered[pending.pop().name] = current
    return list(ordered.values())


def dependencies_of(tensors: Iterable[Any]) -> set[str]:
    """Return the names of the operations that tensors depend on."""
    needed: set[str] = set()
    pending = [tensor.op for tensor in tensors]
    while pending:
        operation = pending.pop()
        if operation.name not in needed:
            needed.add(operation.name)
            pending.extend((*(tensor.op for tensor in operation.inputs), *operation.control_inputs))
    return needed


def root_of(tensor: Any) -> Any:
    """Return the tensor that owns the buffer."""
    while tensor.op.type in ALIASES and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def bytes_of(tensor: Any) -> int:
    """Return a tensor's bytes, or 0 if its shape is unknown."""
    return tensor_of(tensor).bytes or 0


def list_bytes(operation: Any, tensor: Any) -> int:
    """Return the final bytes of a tensor list: the size of an element times the iterations of its loop."""
    import tensorflow as tf

    if operation.type == "TensorListFromTensor":
        return bytes_of(operation.inputs[0])
    number = tensor.value_index
    if operation.type not in ("While", "StatelessWhile") or number >= len(operation.inputs):
        return 0
    source = operation.inputs[number].op
    if source.type not in ("EmptyTensorList", "TensorListReserve"):
        return 0
    shape = tf.get_static_value(source.inputs[0])
    sizes = [] if shape is None else [int(size) for size in shape.flat]
    if shape is None or any(size < 0 for size in sizes):
        return 0
    return _iterations(operation) * math.prod(sizes) * element_bytes(source.get_attr("element_dtype").name)


def _iterations(loop: Any) -> int:
    """Return the number of iterations of a loop over the steps of a sequence."""
    import tensorflow as tf

    counts = [1]
    for tensor in loop.inputs:
        if tensor.op.type == "TensorListFromTensor":
            counts.append(tensor.op.inputs[0].shape[0] or 1)
        elif tensor.op.type == "TensorListReserve":
            size = tf.get_static_value(tensor.op.inputs[1])
            counts.append(1 if size is None else int(size))
    return max(counts)
