"""TensorFlow's graphs: Grappler, values of constants, bodies of loops, whether a tape records or XLA compiles here."""

from __future__ import annotations

import contextlib
from typing import Any

from kerasmem.compat.borrowing import Borrowed

OPTIMIZE = Borrowed(
    "tensorflow.python.grappler.tf_optimizer", "OptimizeGraph", feature="method 'graph'",
    parameters=("config_proto", "metagraph"),
)  # fmt: skip
CONSTANT_VALUE = Borrowed(
    "tensorflow.python.framework.smart_cond", "smart_constant_value", feature="method 'graph' for loops",
    parameters=("pred",),
)  # fmt: skip
_RECOMPUTE = "kerasmem.recompute"
_STOP = Borrowed("tensorflow.python.eager.record", "stop_recording", feature=_RECOMPUTE)
_COULD_RECORD = Borrowed("tensorflow.python.eager.record", "could_possibly_record", feature=_RECOMPUTE)
_IN_XLA = Borrowed(
    "tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext", feature=_RECOMPUTE, parameters=("graph",)
)
_LOOP_GRAPH = Borrowed("tensorflow.python.ops.while_v2", "_get_graph", feature=_RECOMPUTE, parameters=("while_op",))


def optimise(definition: Any, fetches: list[str], fuses: bool = True) -> Any:
    """Return what Grappler makes of a graph.

    Args:
        definition: a `GraphDef`.
        fetches: names of the operations and tensors that are asked for.
        fuses: whether operations are fused with those after them ("remapping").
    """
    import tensorflow as tf

    whole = tf.compat.v1.MetaGraphDef()
    whole.graph_def.CopyFrom(definition)
    whole.collection_def["train_op"].node_list.value.extend(fetches)
    config = tf.compat.v1.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.min_graph_nodes = -1
    # Passes that leave a graph on the CPU as it is: they choose layouts and swap tensors for GPUs (and note with
    # assignments what the executor does not read), and move operations into branches, which are functions.
    rewriting.layout_optimizer = rewriting.OFF
    rewriting.memory_optimization = rewriting.NO_MEM_OPT
    if not definition.library.function:
        rewriting.experimental_conditional_code_motion = rewriting.OFF
    if not fuses:
        rewriting.remapping = rewriting.OFF
    return OPTIMIZE.get()(config, whole)


def constant_value(tensor: Any) -> Any:
    """Return the value of a tensor in a graph, evaluated where it depends on constants alone; None otherwise.

    `tf.get_static_value` knows some kinds of operations only; this runs them all.
    """
    return CONSTANT_VALUE.get()(tensor)


def stop_recording() -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which no gradient tape records."""
    scope: contextlib.AbstractContextManager[Any] = _STOP.get()()
    return scope


def could_record() -> bool:
    """Return whether a gradient tape may record here."""
    return bool(_COULD_RECORD.get()())


def in_xla() -> bool:
    """Return whether what is traced here will be compiled by XLA."""
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and bool(_IN_XLA.get()(graph))


def loop_body(operation: Any) -> Any:
    """Return the graph of the body of a While operation."""
    return _LOOP_GRAPH.get()(operation, "body", "_body_graph")
