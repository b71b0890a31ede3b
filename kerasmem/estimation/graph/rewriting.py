"""Rewriting of a traced step's graph as in TensorFlow's runtime."""

from __future__ import annotations

import math
from typing import Any

from kerasmem.compat.tensorflow_runtime import CPU, GPU, has_gpu_kernel, optimise
from kerasmem.devices.host import default_memory_limit
from kerasmem.devices.kernels import CardKernels, cpu_kernels, kernel_variables
from kerasmem.errors import KerasmemError, first_line
from kerasmem.estimation.graph.program import NotModelled, tensor_of
from kerasmem.estimation.graph.scratch import Kernels
from kerasmem.models.step import TracedStep
from kerasmem.processes.children import Limits, child_environment
from kerasmem.processes.forking import run_child

DEEP = 20_000  # operations
GRAPPLER_SECONDS = 1800.0  # limit of a subprocess
LARGE = 1 << 20  # bytes
# Grappler creates a tensor of zeros for each placeholder, as large as the batch. Placeholders with more elements are
# replaced by a source of known shape without such a tensor.
LARGEST_FED, UNFED = 16 * 2**20, "InfeedDequeue"
_FUNCTIONAL = frozenset({"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"})


def rewrite(traced: TracedStep, kernels: Kernels) -> tuple[Any, Any]:
    """Optimise a traced step's graph as TensorFlow does. Return it and its `GraphDef`.

    Args:
        traced: the step.
        kernels: kernels of the CPU or card that runs it.

    Raises:
        NotModelled: If Grappler cannot optimise the graph, or TensorFlow cannot import the result.
    """
    graph, is_on_card = traced.function.graph, isinstance(kernels, CardKernels)
    definition = _runnable(traced, is_on_card)
    _lower(definition)
    # The results wait for all operations that must run, which TensorFlow does not fetch. With more fetches, Grappler
    # returns the same nodes in another order.
    fetches = list(dict.fromkeys(result.name for result in graph.outputs or graph.control_outputs))
    if len(definition.node) > DEEP:
        _fold_large(graph, definition)
    reason = ""
    for fuses in (True, False):  # Grappler may fuse operations without a kernel, such as bfloat16 convolutions
        try:
            optimised = _optimise(definition, fetches, fuses, kernels)
        except KerasmemError:
            raise
        except Exception as error:
            raise NotModelled(f"Grappler cannot optimise the step's graph: {first_line(error)}") from error
        _set_shapes(optimised, traced)
        try:
            return _import(optimised, is_on_card), optimised
        except ValueError as error:
            reason = first_line(error)
    raise NotModelled(f"TensorFlow cannot import the optimised graph: {reason}")


def _optimise(definition: Any, fetches: list[str], fuses: bool, kernels: Kernels) -> Any:
    """Run Grappler, in a process with the step's kernels, as it fuses more operations if oneDNN is on (remapper.cc)."""
    if isinstance(kernels, CardKernels):
        return optimise(definition, fetches, fuses, kernels.capability)
    if kernels.kind == cpu_kernels().kind:
        return optimise(definition, fetches, fuses)
    environ = child_environment(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", **kernel_variables(kernels.kind))
    limits = Limits(GRAPPLER_SECONDS, default_memory_limit())
    return run_child(optimise, definition, fetches, fuses, limits=limits, environ=environ)


def _set_shapes(definition: Any, traced: TracedStep) -> None:
    """Set the shapes of the batch, which are open for Grappler. TensorFlow infers all others from them."""
    arguments = zip(traced.function.graph.inputs[: len(traced.flat)], traced.flat, strict=True)
    shapes = {tensor.op.name: spec.shape for tensor, spec in arguments}
    for node in definition.node:
        node.attr.pop("_output_shapes", None)
        if node.name in shapes:
            node.attr["shape"].shape.CopyFrom(shapes[node.name].as_proto())


def _lower(definition: Any) -> None:
    """Lower loops and branches that are one operation, as in the CTC loss."""
    inside = (node for function in definition.library.function for node in function.node_def)
    for node in (*definition.node, *inside):
        if node.op in _FUNCTIONAL:
            node.attr["_lower_using_switch_merge"].b = True


def _fold_large(graph: Any, definition: Any) -> None:
    """Replace operations that compute large tensors from constants by plain sources.

    A decoder computes a mask in each of its blocks. Grappler would evaluate all of them before it finds that they are
    equal, in memory and time that grow with the depth.
    """
    nodes = {node.name: node for node in definition.node}
    constant: set[str] = set()  # operations on constants
    for operation in graph.get_operations():
        outputs = [tensor_of(output) for output in operation.outputs]
        on_shapes = operation.type in ("Shape", "ShapeN", "Size", "Rank") and all(
            tensor.shape.is_fully_defined() for tensor in operation.inputs
        )
        on_constants = bool(operation.inputs) and all(tensor.op.name in constant for tensor in operation.inputs)
        if not (operation.type == "Const" or on_shapes or (on_constants and not operation.op_def.is_stateful)):
            continue
        if not outputs or any(output.bytes is None for output in outputs):
            continue
        constant.add(operation.name)
        if operation.type != "Const" and len(outputs) == 1 and (outputs[0].bytes or 0) > LARGE:
            node, output = nodes[operation.name], operation.outputs[0]
            node.op = UNFED
            del node.input[:]
            node.attr.clear()
            node.attr["dtype"].type = output.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(output.shape.as_proto())


def _runnable(traced: TracedStep, is_on_card: bool) -> Any:
    """Return the function's graph on its devices, with an operation per captured variable."""
    import tensorflow as tf

    graph = traced.function.graph
    definition = graph.as_graph_def()
    for node in definition.node:
        node.device = CPU
        variable = traced.captures.get(node.name)
        if variable is not None:
            node.op = "VarHandleOp"
            del node.input[:]
            node.attr.clear()
            node.attr["dtype"].type = tf.as_dtype(variable.dtype).as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(tuple(variable.shape)).as_proto())
            node.attr["shared_name"].s = node.name.encode()
        elif node.op == "Placeholder" and math.prod(size.size for size in node.attr["shape"].shape.dim) > LARGEST_FED:
            node.op = UNFED
    if is_on_card:
        # The batch of `fit` comes from a dataset on the host.
        batch = {tensor.op.name for tensor in graph.inputs[: len(traced.flat)]}
        for node in definition.node:
            node.device = GPU if node.name not in batch and has_gpu_kernel(node) else CPU
    return definition


def _import(definition: Any, is_on_card: bool) -> Any:
    import tensorflow as tf

    if not is_on_card:
        for node in definition.node:
            node.device = ""  # equal names on all nodes would only take time
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    return graph
