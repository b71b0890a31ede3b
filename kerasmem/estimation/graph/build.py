"""Conversion of a traced step to TensorFlow's program, as plain data."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from kerasmem.compat.tensorflow_runtime import constant_value, has_gpu_kernel
from kerasmem.devices.kernels import ONEDNN, CardKernels
from kerasmem.estimation.graph.control import CONTROL, unroll
from kerasmem.estimation.graph.cuda import rnn_reserve
from kerasmem.estimation.graph.lists import Evaluate, Infer, resolve_lists
from kerasmem.estimation.graph.memory import recipes_of
from kerasmem.estimation.graph.program import COPY, ON_HOST, Node, NotModelled, Program, Tensor, Variable, tensor_of
from kerasmem.estimation.graph.rewriting import UNFED, rewrite
from kerasmem.estimation.graph.rules import FORWARDS, KINDS, TABLES, table_of
from kerasmem.estimation.graph.scratch import AXES, Kernels, reduction
from kerasmem.models.sizes import element_bytes
from kerasmem.models.step import TracedStep

_HOST_DTYPES = ("int32", "string")  # kept in the host's memory if a card runs the step
_FILLS = ("Zeros", "Ones", "Constant", "function")
_KEPT_ATTRIBUTES = (
    "strides", "padding", "dilations", "data_format", "is_training", "rnn_mode", "frame_name", "is_constant",
    "parallel_iterations", "equation", "ksize", "transpose_b",
)  # fmt: skip
# Operations on constants are computed once, when the step is prepared: by Grappler if the result is small
# (kMaxConstantSize), by the runtime up to the second limit (constant_folding.h).
_SMALL_CONSTANT, _LARGEST_CONSTANT = 100 << 10, 10 << 20
_REDUCTIONS = frozenset(name for name, needs in KINDS["both"]["scratch"].items() if needs == reduction.__name__)


def _small_reserve(node: Node) -> tuple[Tensor, ...]:
    """Return the outputs of a batch normalisation, with a reserve of one element (fused_batch_norm_op.cc)."""
    last = node.outputs[-1].dtype
    return (*node.outputs[:-1], Tensor((), last, element_bytes(last)))


# Operations that pass a tensor of unknown size to their gradient.
_RESERVES = {
    "CudnnRNNV3": rnn_reserve, "FusedBatchNormV3": _small_reserve, "_FusedBatchNormEx": _small_reserve,
}  # fmt: skip


def build_program(traced: TracedStep, kernels: Kernels) -> tuple[Program, tuple[str, ...]]:
    """Optimise a traced step as TensorFlow does, and return its program and notes.

    Args:
        traced: the step.
        kernels: kernels of the CPU or card that runs it.

    Raises:
        NotModelled: If Grappler cannot optimise the graph, or a loop or a size depends on the data.
    """
    graph, definition = rewrite(traced, kernels)
    program, notes = unroll(_plain(graph, traced, kernels))
    by_name = {node.name: node for node in definition.node}
    shape_functions = _shape_functions(by_name, definition.versions)
    on_host: set[str] = set()
    if isinstance(kernels, CardKernels):
        on_host = {name for name, node in by_name.items() if "CPU" in node.device or not has_gpu_kernel(node)}

    def complete(unrolled: Program) -> Program:
        merged = merge_bias_gradients(resolve_lists(unrolled, *shape_functions), kernels)
        return on_card(merged, on_host) if isinstance(kernels, CardKernels) else merged

    if not program.alternatives:
        return complete(program), notes
    programs, reasons = [], []
    for unrolled in (replace(program, alternatives=()), *program.alternatives):
        try:
            completed = complete(unrolled)
            recipes_of(completed, kernels)
        except NotModelled as error:
            reasons.append(error)
        else:
            programs.append(completed)
    if not programs:
        raise reasons[0]
    notes += tuple(dict.fromkeys(f"the interval lacks a branch: {reason}" for reason in reasons))
    return replace(programs[0], alternatives=tuple(programs[1:])), notes


def on_card(program: Program, on_host: Set[str]) -> Program:
    """Assign a program's tensors to the card or the host, and add copies.

    Kernels on a card keep shapes and most other 32-bit integers on the host. Any other tensor is copied once if an
    operation needs it in the other memory (tensorflow/core/graph/graph_partition.cc, common_runtime/memory_types.cc).

    Args:
        program: the step, with unrolled loops.
        on_host: names of the operations that run on the CPU.
    """
    nodes: list[Node] = []
    for node in program.nodes:
        is_on_host = node.name in on_host
        outputs = tuple(replace(tensor, on_host=is_on_host or tensor.dtype in _HOST_DTYPES) for tensor in node.outputs)
        attributes = {**node.attributes, ON_HOST: True} if is_on_host else node.attributes
        nodes.append(replace(node, outputs=outputs, attributes=attributes))
    copies: dict[tuple[int, int], int] = {}

    def source_in(is_on_host: bool, source: tuple[int, int]) -> tuple[int, int]:
        node = nodes[source[0]]
        tensor = node.outputs[source[1]]
        if tensor.on_host == is_on_host or tensor.dtype in (*_HOST_DTYPES, "resource", "variant"):
            return source
        if source not in copies:
            copies[source] = len(nodes)
            nodes.append(Node(node.name, COPY, (source,), (), (replace(tensor, on_host=is_on_host),), {}))
        return copies[source], 0

    for number, node in enumerate(program.nodes):
        inputs = tuple(source_in(node.name in on_host, source) for source in node.inputs)
        nodes[number] = replace(nodes[number], inputs=inputs)
    return replace(program, nodes=tuple(nodes))


def merge_bias_gradients(program: Program, kernels: Kernels) -> Program:
    """Merge bias gradients into oneDNN's gradients of filters (mkl_layout_pass.cc)."""
    nodes = list(program.nodes)
    biases = {node.inputs[0]: number for number, node in enumerate(nodes) if node.type == "BiasAddGrad"}
    moved: dict[tuple[int, int], tuple[int, int]] = {}
    for number, node in enumerate(nodes):
        if node.type == "Conv2DBackpropFilter" and table_of(node, kernels) is TABLES[ONEDNN]:
            bias = biases.pop(node.inputs[2], None)
            if bias is not None:
                moved[bias, 0] = number, 1
                nodes[number] = replace(node, outputs=(*node.outputs, *nodes[bias].outputs))
                nodes[bias] = Node(nodes[bias].name, "NoOp", (), (), (), {})
    for number, node in enumerate(nodes):
        nodes[number] = replace(node, inputs=tuple(moved.get(source, source) for source in node.inputs))
    return replace(program, nodes=tuple(nodes), results=tuple(moved.get(end, end) for end in program.results))


def _shape_functions(by_name: dict[str, Any], versions: Any) -> tuple[Infer, Evaluate]:
    """Return functions that infer an operation's shapes and evaluate it with TensorFlow."""
    operations: dict[Any, Any] = {}

    def isolate(node: Node, inputs: Sequence[Tensor], values: Sequence[Any]) -> Any:
        contents = tuple(None if value is None else (value.shape, value.tobytes()) for value in values)
        key = (node.name, tuple(tensor.shape for tensor in inputs), contents)
        if key not in operations:
            definition = by_name.get(node.name)
            operations[key] = None if definition is None else _isolate(definition, versions, inputs, values)
        return operations[key]

    def infer(node: Node, inputs: Sequence[Tensor], values: Sequence[Any]) -> list[tuple[int, ...] | None] | None:
        operation = isolate(node, inputs, values)
        return None if operation is None else [tensor_of(output).shape for output in operation.outputs]

    def evaluate(node: Node, output: int, inputs: Sequence[Tensor], values: Sequence[Any]) -> Any:
        operation = isolate(node, inputs, values)
        return None if operation is None else constant_value(operation.outputs[output])

    return infer, evaluate


def _isolate(definition: Any, versions: Any, inputs: Sequence[Tensor], values: Sequence[Any]) -> Any:
    """Return the operation in a separate graph, or None if TensorFlow refuses it. Known values are constants."""
    import tensorflow as tf

    graph_def = tf.compat.v1.GraphDef(versions=versions, node=[definition])
    node = graph_def.node[0]
    del node.input[:]
    node.attr.pop("_class", None)
    with tf.Graph().as_default() as graph:
        sources = {}
        for index, (tensor, value) in enumerate(zip(inputs, values, strict=True)):
            node.input.append(f"input_{index}")
            sources[f"input_{index}"] = (
                tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
                if value is None
                else tf.constant(value, tensor.dtype)
            )
        try:
            tf.import_graph_def(graph_def, input_map=sources, name="")
        except ValueError:
            return None
    return graph.get_operation_by_name(definition.name)


def _plain(graph: Any, traced: TracedStep, kernels: Kernels) -> Program:
    operations = graph.get_operations()
    numbers = {operation.name: number for number, operation in enumerate(operations)}
    variables = {id(variable): index for index, variable in enumerate(traced.variables)}
    nodes = []
    variable_of: dict[int, int] = {}  # by node that passes on a variable's handle
    for number, operation in enumerate(operations):
        inputs = tuple((numbers[tensor.op.name], tensor.value_index) for tensor in operation.inputs)
        captured = id(traced.captures.get(operation.name))
        if operation.type == "VarHandleOp" and captured in variables:
            variable_of[number] = variables[captured]
        elif inputs and inputs[0][0] in variable_of:
            variable_of[number] = variable_of[inputs[0][0]]
        controls = tuple(numbers[source.name] for source in operation.control_inputs)
        nodes.append(node_of(operation, inputs, controls, variable_of.get(number)))
    names = (tensor.name.partition(":") for tensor in traced.function.graph.outputs)
    results = tuple((numbers[name], int(output or 0)) for name, _, output in names if name in numbers)
    stateful = {number for number, operation in enumerate(operations) if operation.op_def.is_stateful}
    _fold_constants(nodes, stateful, results)
    _add_pooling_indices(nodes, kernels)
    _add_compiled_scratch(nodes)
    batch = [tensor.op.name for tensor in traced.function.graph.inputs[: len(traced.flat)]]
    arguments = tuple(numbers[name] for name in batch if name in numbers)
    shape_constants = 0 if isinstance(kernels, CardKernels) else _shape_constants(traced)
    return Program(tuple(nodes), step_variables(traced), arguments, results, shape_constants=shape_constants)


def _shape_constants(traced: TracedStep) -> int:
    """Return the number of constants (sizes, axes, permutations) that shape functions have read.

    Each has its own buffer as long as the traced graph lives (core/common_runtime/shape_refiner.cc). Elementwise
    operations read none. A first call that creates the optimizer's variables traces twice, which is not counted.
    """
    operations = [operation for operation in traced.function.graph.get_operations() if operation.type not in FORWARDS]
    inputs = itertools.chain.from_iterable(operation.inputs for operation in operations)
    return sum(tensor.op.type == "Const" and tensor.dtype.is_integer for tensor in inputs)


def _fold_constants(nodes: list[Node], stateful: set[int], results: tuple[tuple[int, int], ...]) -> None:
    """Replace operations on constants by constants, and remove operations that only those used.

    Only the last result of a chain remains. If it is too large, the whole chain runs in each step.
    """
    constant: set[int] = set()  # sources come before their consumers
    for number, node in enumerate(nodes):
        follows = bool(node.inputs) and number not in stateful and node.type not in CONTROL
        is_plain = all(out.bytes is not None and out.dtype not in ("resource", "variant") for out in node.outputs)
        if node.type == "Const" or (follows and is_plain and all(source in constant for source, _ in node.inputs)):
            constant.add(number)
    used = {source for source, _ in results}
    used.update(source for number, node in enumerate(nodes) if number not in constant for source, _ in node.inputs)
    for number in constant & used:
        node = nodes[number]
        size = sum(tensor.bytes or 0 for tensor in node.outputs)
        if node.type != "Const" and _SMALL_CONSTANT < size <= _LARGEST_CONSTANT:
            nodes[number] = replace(node, type="Const", inputs=(), attributes={})
    uses = Counter(source for node in nodes for source, _ in node.inputs)
    for number in sorted(constant - used, reverse=True):  # consumers come before their sources
        node = nodes[number]
        if node.inputs and not uses[number]:
            uses.subtract(source for source, _ in node.inputs)
            nodes[number] = Node(node.name, "NoOp", (), node.controls, (), {})


def node_of(
    operation: Any,
    inputs: tuple[tuple[int, int], ...] = (),
    controls: tuple[int, ...] = (),
    variable: int | None = None,
) -> Node:
    """Return a TensorFlow operation as plain data.

    Args:
        operation: the operation.
        inputs: (node, output) of each input. Defaults to none.
        controls: nodes of its control edges. Defaults to none.
        variable: number of the variable that it works on. Defaults to None.
    """
    node = Node(
        operation.name,
        "Placeholder" if operation.type == UNFED else operation.type,
        inputs,
        controls,
        tuple(map(tensor_of, operation.outputs)),
        _attributes(operation),
        variable,
    )
    return replace(node, outputs=_RESERVES[node.type](node)) if node.type in _RESERVES else node


def _add_pooling_indices(nodes: list[Node], kernels: Kernels) -> None:
    """Add the indices of maxima that oneDNN's max pooling outputs for its gradient."""
    for number, node in enumerate(nodes):
        if node.type not in ("MaxPoolGrad", "MaxPool3DGrad") or table_of(node, kernels) is not TABLES[ONEDNN]:
            continue
        source = node.inputs[1][0]
        pool = nodes[source]
        shape, window = pool.outputs[0].shape, math.prod(node.attributes.get("ksize", ()))
        if shape is None:
            continue
        if len(pool.outputs) == 1:
            dtype = "uint8" if window <= 256 else "int32"
            indices = Tensor(shape, dtype, math.prod(shape) * element_bytes(dtype))
            nodes[source] = replace(pool, outputs=(*pool.outputs, indices))
        nodes[number] = replace(node, inputs=(*node.inputs, (source, 1)))


def _add_compiled_scratch(nodes: list[Node]) -> None:
    """Add the scratch of functions that XLA compiles, such as Keras's grouped convolutions."""
    cache: dict[Any, int] = {}
    for number, node in enumerate(nodes):
        nodes[number] = with_compiled_scratch(
            node, [nodes[source].outputs[output] for source, output in node.inputs], cache
        )


def with_compiled_scratch(node: Node, inputs: Sequence[Tensor], cache: dict[Any, int]) -> Node:
    """Return an operation with its scratch if it calls an XLA-compiled function.

    Args:
        node: the operation.
        inputs: its inputs.
        cache: bytes by the function's body and shapes.
    """
    name = node.attributes.get("compiled_function")
    if name is None or any(tensor.shape is None for tensor in inputs):  # the shapes of variables are unknown
        return node
    from kerasmem.compat.tensorflow_runtime import body_of
    from kerasmem.estimation.xla import XlaRefused, scratch_of_function

    key = (body_of(name), tuple(tensor.shape for tensor in inputs))
    if key not in cache:
        try:
            cache[key] = scratch_of_function(name, [(tensor.shape or (), tensor.dtype) for tensor in inputs])
        except XlaRefused:
            return node
    return replace(node, attributes={**node.attributes, "scratch": cache[key]})


def step_variables(traced: TracedStep) -> tuple[Variable, ...]:
    """Return a step's variables as plain data, in order of creation."""
    return tuple(_variable(variable, traced) for variable in traced.variables)


def _variable(variable: Any, traced: TracedStep) -> Variable:
    shape, dtype = tuple(variable.shape), str(variable.dtype)
    kind, initializer = traced.kinds[id(variable)], type(getattr(variable, "_initializer", None)).__name__
    # A variable with a value has no initializer. Vectors usually begin as constants, matrices as random numbers.
    is_random = kind == "weights" and len(shape) > 1 if initializer == "NoneType" else initializer not in _FILLS
    return Variable(
        variable.path,
        math.prod(shape) * element_bytes(dtype),
        kind,
        "random" if is_random else "filled",
        shape,
        dtype,
    )


def _attributes(operation: Any) -> dict[str, Any]:
    import tensorflow as tf

    definition = operation.node_def
    attributes = {key: operation.get_attr(key) for key in _KEPT_ATTRIBUTES if key in definition.attr}
    if "_XlaMustCompile" in definition.attr and definition.attr["_XlaMustCompile"].b and "f" in definition.attr:
        attributes["compiled_function"] = definition.attr["f"].func.name
    if operation.type in _REDUCTIONS and (axes := tf.get_static_value(operation.inputs[1])) is not None:
        attributes[AXES] = tuple(int(axis) for axis in axes.flat)
    if operation.type == "Const":
        value = definition.attr["value"].tensor
        if math.prod(size.size for size in value.tensor_shape.dim) <= 64:
            attributes["value"] = tf.make_ndarray(value)
    return attributes
