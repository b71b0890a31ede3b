"""TensorFlow's graphs: Grappler's rewriting of one, and the values of tensors that depend on constants alone."""

from __future__ import annotations

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
    if not fuses:
        rewriting.remapping = rewriting.OFF
    return OPTIMIZE.get()(config, whole)


def constant_value(tensor: Any) -> Any:
    """Return the value of a tensor in a graph, evaluated where it depends on constants alone; None otherwise.

    `tf.get_static_value` knows some kinds of operations only; this runs them all.
    """
    return CONSTANT_VALUE.get()(tensor)
