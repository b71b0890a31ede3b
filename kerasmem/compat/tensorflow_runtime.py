"""TensorFlow: state of its runtime, graphs and kernels, Grappler, XLA's plan of memory."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.patching import patch

_TF, _EAGER = "tensorflow.python", "tensorflow.python.eager"
# Returns whether `tf.config.experimental.enable_op_determinism()` was called.
operations_are_deterministic = Borrowed(
    f"{_TF}.framework.config:is_op_determinism_enabled",
    feature="kerasmem.fit(isolated=True) with deterministic operations",
)
# Returns whether TensorFlow uses oneDNN on the CPU.
onednn_is_on = Borrowed(f"{_TF}.util._pywrap_util_port:IsMklEnabled", feature="detection of TensorFlow's CPU kernels")
_CURRENT = Borrowed(f"{_EAGER}.context:_context", feature="the peak of a kerasmem.run_isolated function")
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_STAGE = "optimized_hlo_proto_serialized"
_XLA = "method 'xla'"
COMPILE_FUNCTION = Borrowed(f"{_EAGER}.polymorphic_function.compiler_ir:from_concrete_function", feature=_XLA)
CONTEXT = Borrowed(f"{_EAGER}.context:context", feature=_XLA)
COMPILE_NAMED = Borrowed(f"{_EAGER}.context:Context.get_compiler_ir", feature=_XLA)
FUNCTION_DEF = Borrowed(f"{_EAGER}.context:Context.get_function_def", feature="fast planning of grouped convolutions")
# The plan is the same, and code generation, up to half of the time, is faster. XLA reads its flags once in a process,
# before the first compilation.
UNOPTIMISED = "--xla_backend_optimization_level=0"
OPTIMIZE = Borrowed(f"{_TF}.grappler.tf_optimizer:OptimizeGraph", feature="method 'graph'")
# Returns the value of a tensor that depends on constants only, or None. Unlike `tf.get_static_value`, it supports all
# operations.
constant_value = Borrowed(f"{_TF}.framework.smart_cond:smart_constant_value", feature="method 'graph' for loops")
_ON_A_CARD = "method 'graph' for a card"
CLUSTER = Borrowed(f"{_TF}.grappler.cluster:Cluster", feature=_ON_A_CARD)
KERNELS = Borrowed(f"{_TF}.framework.kernels:get_registered_kernels_for_op", feature=_ON_A_CARD)
GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
STACK = Borrowed(f"{_TF}.util.tf_stack:extract_stack", feature="quick estimates")
_CLONE = Borrowed(
    f"{_TF}.eager.polymorphic_function.polymorphic_function:Function._clone",
    feature="estimates of steps that call a tf.function",
)
_RECOMPUTE = "kerasmem.recompute"
# Scope without gradient tapes.
stop_recording = Borrowed(f"{_TF}.eager.record:stop_recording", feature=_RECOMPUTE)
# Return whether a gradient tape may record, and whether one has recorded one of some tensors.
could_record = Borrowed(f"{_TF}.eager.record:could_possibly_record", feature=_RECOMPUTE)
any_is_recorded = Borrowed(f"{_TF}.eager.record:should_record_backprop", feature=_RECOMPUTE)
# Adds control dependencies from an operation to others of its graph.
add_control_inputs = Borrowed(f"{_TF}.framework.ops:Operation._add_control_inputs", feature=_RECOMPUTE)
_IN_XLA = Borrowed(f"{_TF}.ops.control_flow_util:GraphOrParentsInXlaContext", feature=_RECOMPUTE)
_CONTROL = frozenset({"Enter", "RefEnter", "Switch", "RefSwitch", "Stack", "StackV2"})


def devices_are_started() -> bool:
    """Return whether TensorFlow has initialized its devices (False if unknown)."""
    if "tensorflow" not in sys.modules or not _CURRENT.exists():
        return False
    return bool(getattr(_CURRENT.get(), "_initialized", False))


def compile_function(function: Any, arguments: list[Any]) -> bytes:
    """Compile a concrete function for this machine's CPU, and return XLA's serialized `HloProto`.

    Args:
        function: a concrete function of TensorFlow.
        arguments: a `tf.TensorSpec` for each argument.
    """
    generate = COMPILE_FUNCTION(function, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `device_name` is deprecated, but `platform_name` does not support CPUs
        return bytes(generate(stage=_STAGE, device_name=CPU))


def compile_named(name: str, arguments: list[Any]) -> bytes:
    """Compile a function of TensorFlow's runtime, and return XLA's serialized `HloProto`.

    Args:
        name: name of the function.
        arguments: a `tf.TensorSpec` for each argument.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serialised: bytes = COMPILE_NAMED(
            CONTEXT(), device_name=CPU, platform_name=None, function_name=name, flat_args=arguments,
            captured_inputs=[], stage=_STAGE,
        )  # fmt: skip
    return serialised


def body_of(name: str) -> Any:
    """Describe a function of TensorFlow's runtime so that functions which differ only in names are equal.

    A model has a function for each grouped convolution, and few differ.

    Args:
        name: name of the function.
    """
    import tensorflow as tf

    try:
        definition = FUNCTION_DEF(CONTEXT(), name)
    except (NotAvailableError, tf.errors.NotFoundError):
        return name
    arguments, nodes = definition.signature.input_arg, definition.node_def
    number = {node.name: index for index, node in enumerate((*arguments, *nodes))}

    def source(text: str) -> tuple[Any, ...]:
        producer, *output = text.removeprefix("^").split(":")
        return text[0] == "^", number[producer], *output

    operations = tuple(
        (node.op, tuple(map(source, node.input)), *sorted((key, repr(value)) for key, value in node.attr.items()))
        for node in nodes
    )
    results = tuple(source(definition.ret[output.name]) for output in definition.signature.output_arg)
    return tuple(argument.type for argument in arguments), operations, results


def has_gpu_kernel(definition: Any) -> bool:
    """Return whether TensorFlow has a GPU kernel for an operation and its dtypes. No GPU is needed.

    Args:
        definition: the operation's `NodeDef`.
    """
    label = definition.attr["_kernel"].s.decode() if "_kernel" in definition.attr else ""
    return any(
        kernel_label == label and all(dtypes.issuperset(_dtypes(definition.attr[name])) for name, dtypes in allowed)
        for kernel_label, allowed in _gpu_kernels(definition.op)
    )


def _dtypes(value: Any) -> tuple[int, ...]:
    return tuple(value.list.type) if value.HasField("list") else (value.type,)


@functools.cache
def _gpu_kernels(operation: str) -> tuple[tuple[str, tuple[tuple[str, frozenset[int]], ...]], ...]:
    """Return the label of each GPU kernel for an operation, and its supported dtypes by attribute."""
    return tuple(
        (kernel.label, tuple((item.name, frozenset(item.allowed_values.list.type)) for item in kernel.constraint))
        for kernel in KERNELS(operation).kernel
        if kernel.device_type in ("GPU", "DEFAULT")
    )


def stacks_left_out() -> contextlib.AbstractContextManager[None]:
    """Record the same stack for all operations that this thread creates.

    An estimate does not use the stacks, and extracting them takes a tenth of the time.
    """
    if not STACK.exists():
        return contextlib.nullcontext()
    stack = STACK()
    return patch(*STACK.owner(), lambda extract_stack, *args, **kwargs: stack)


def all_reduces_traced(replicas: int, scope: str) -> contextlib.AbstractContextManager[None]:
    """Trace `tf.distribute`'s exchange of gradients, as for one of several replicas, in this thread.

    Keras sums the gradients by `all_reduce`. `MirroredStrategy` and `MultiWorkerMirroredStrategy` pack all dense ones
    into one buffer, the last first, reduce it in place and split it (`_all_reduce` in cross_device_ops.py and
    `batch_all_reduce` in cross_device_utils.py, with `bytes_per_pack` 0; `CollectiveReduceV2` in collective_ops.cc).
    So no weight is updated before all gradients are there.

    Args:
        replicas: number of devices that train together.
        scope: name scope of the operations.
    """
    import tensorflow as tf

    def all_reduce(original: Any, context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        dense = [number for number, part in enumerate(flat) if not isinstance(part, tf.IndexedSlices)][::-1]
        if not dense:
            return value
        with tf.name_scope(f"{scope}/"):
            pack = tf.concat([tf.reshape(flat[number], [-1]) for number in dense], 0)
            reduced = tf.raw_ops.CollectiveReduceV2(
                input=pack, group_size=replicas, group_key=1, instance_key=1, ordering_token=[], merge_op="Add",
                final_op="Id",
            )  # fmt: skip
            parts = tf.split(reduced, [tf.size(flat[number]) for number in dense])
            for number, part in zip(dense, parts, strict=True):
                flat[number] = tf.reshape(part, tf.shape(flat[number]))
        return tf.nest.pack_sequence_as(value, flat)

    return patch(tf.distribute.ReplicaContext, "all_reduce", all_reduce)


def functions_traced_anew() -> contextlib.AbstractContextManager[None]:
    """Retrace each `tf.function` that this thread calls, because variables of its last trace may be deleted."""
    if not _CLONE.exists():
        return contextlib.nullcontext()
    clones: dict[int, tuple[Any, Any]] = {}  # by id; the function itself keeps the id unique

    def call(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if id(function) not in clones:
            clones[id(function)] = function, _CLONE(function, None)
        return original(clones[id(function)][1], *args, **kwargs)

    return patch(_CLONE.owner()[0], "__call__", call)


def optimise(definition: Any, fetches: list[str], fuses: bool = True, capability: tuple[int, int] | None = None) -> Any:
    """Optimize a graph with Grappler.

    Args:
        definition: a `GraphDef`.
        fetches: names of the operations and tensors to compute.
        fuses: whether Grappler fuses operations ("remapping").
        capability: compute capability of a card beside the CPU, which need not be present; None for a CPU only.
    """
    import tensorflow as tf

    whole = tf.compat.v1.MetaGraphDef()
    whole.graph_def.CopyFrom(definition)
    whole.collection_def["train_op"].node_list.value.extend(fetches)
    config = tf.compat.v1.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.min_graph_nodes = -1
    # Skip passes that do not change such a graph on a CPU: layouts for GPUs, code motion into branches, selection of
    # implementations, the conversion to MLIR, loops. The memory pass computes sums of three and more values in place if
    # the step would fill the device. TensorFlow gives the CPU 256 MiB (threadpool_device_factory.cc) for this purpose,
    # and a card's memory is unknown here.
    if capability is None:
        rewriting.layout_optimizer = rewriting.OFF
    else:
        rewriting.memory_optimization = rewriting.NO_MEM_OPT
    if not definition.library.function:
        rewriting.experimental_conditional_code_motion = rewriting.OFF
        if capability is None:
            rewriting.implementation_selector = rewriting.OFF
            rewriting.disable_tfg_optimizer = True
        if not any(node.op in _CONTROL for node in definition.node):
            rewriting.loop_optimization = rewriting.OFF
    if not fuses:
        rewriting.remapping = rewriting.OFF
    if capability is None:
        return OPTIMIZE(config, whole)
    cluster = _cluster(capability)
    try:
        return OPTIMIZE(config, whole, cluster=cluster)
    finally:
        cluster.Shutdown()


def _cluster(capability: tuple[int, int]) -> Any:
    """Create a cluster of a CPU and a card for Grappler, which only reads the capability."""
    from tensorflow.core.protobuf import device_properties_pb2 as properties

    card = properties.DeviceProperties(type="GPU", vendor="NVIDIA")
    card.environment["architecture"] = "{}.{}".format(*capability)
    devices = ((CPU, properties.DeviceProperties(type="CPU")), (GPU, card))
    return CLUSTER(devices=[properties.NamedDevice(name=name, properties=device) for name, device in devices])


def in_xla() -> bool:
    """Return whether XLA will compile the current graph."""
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and bool(_IN_XLA(graph))
