"""Is a loss of the user's own a mean or a sum over rows? Proven of the operations that compute it, or not at all.

The loss is traced, and each tensor on its way is one of these, by the rules below; any operation without a rule proves
nothing. With pieces of n rows out of N,

- "same": the same in every piece: constants and variables;
- "rows": the first axis is the rows, and each row depends on that row of the data alone;
- "mean": the whole's value is the sum of the pieces' values, each times n/N;
- "sum": the whole's value is the sum of the pieces' values;
- "count": a sum that counts rows, or elements of rows;
- "shape": the shape of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kerasmem.compat.gradients import forget_gradients
from kerasmem.compat.keras_losses import compiled_loss, reduction_replaced

SAME, ROWS, MEAN, SUM, COUNT, SHAPE, UNKNOWN = "same", "rows", "mean", "sum", "count", "shape", "unknown"
_ELEMENTWISE = frozenset(
    "Abs Acos Acosh Add AddV2 Asin Asinh Atan Atan2 Atanh Cast Ceil ClipByValue Cos Cosh Div DivNoNan Elu Equal Erf "
    "Erfc Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv IsFinite IsInf IsNan LeakyRelu Less "
    "LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike "
    "Pow RealDiv Reciprocal Relu Relu6 Rsqrt Round Select SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt "
    "Square SquaredDifference StopGradient Sub Tan Tanh Xlogy Xdivy ZerosLike".split()
)
_LINEAR = frozenset("Add AddV2 Sub Neg Identity Cast StopGradient Mul Div RealDiv Squeeze ExpandDims Reshape".split())
_BY_ROW = frozenset(  # rows of the first input, and what is the same for all in the others
    "AvgPool BiasAdd Conv1D Conv2D Conv3D DepthwiseConv2dNative LogSoftmax MaxPool OneHot Softmax".split()
)
_REDUCTIONS = frozenset("All Any ArgMax ArgMin Max Mean Min Prod Sum".split())


def loss_over_rows(model: Any, batch: Any) -> str:
    """Return whether the model's own `compute_loss` is the "mean" or the "sum" of what the rows give, or "unknown".

    Args:
        model: compiled and built; that its forward pass treats rows one by one is taken for granted.
        batch: one that its step takes; only its shapes count.
    """
    known: dict[str, str] = {}
    reduced: dict[str, list[Any]] = {}
    ends: list[Any] = []

    def noted(reduce: Callable[..., Any], values: Any, **how: Any) -> Any:
        """Stand in for a reduction of Keras's, whose pieces are weighted so that they add up as means do."""
        made = tf.compat.v1.placeholder(keras.backend.standardize_dtype(values.dtype), ())
        reduced[made.name] = [each for each in (values, how["sample_weight"], how["mask"]) if tf.is_tensor(each)]
        return made

    def trace(data: Any) -> Any:
        for leaf in keras.tree.flatten(data):
            if leaf is not None:
                known[leaf.name] = ROWS
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with keras.StatelessScope() as scope:
            predicted = model(x, training=True)
            for leaf in keras.tree.flatten(predicted):
                known[leaf.name] = ROWS
            before = set(scope.state_mapping)
            with reduction_replaced(noted):
                loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=True)
            ends.extend([loss, set(scope.state_mapping) - before - _of_keras(model)])
        for _, inner in loss.graph.captures:
            known.setdefault(inner.name, SAME)
        return loss

    def spec(leaf: Any) -> Any:
        return None if leaf is None else tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype)

    try:
        traced = tf.function(trace, autograph=False).get_concrete_function(keras.tree.map_structure(spec, batch))
        loss, updated = ends
        # what it counts, piece by piece, may be shown otherwise than of the whole
        found = UNKNOWN if updated else _Reading(known, reduced).of(loss)
        forget_gradients(traced.graph)
    except Exception:  # whatever cannot be traced like this is not proven
        return UNKNOWN
    return MEAN if found in (MEAN, SAME) else found if found == SUM else UNKNOWN


def _of_keras(model: Any) -> set[int]:
    """Return the variables of the trackers of single losses, which micro-batches count as Keras does."""
    loss = compiled_loss(model)
    return {id(variable) for metric in (loss.metrics if loss is not None else ()) for variable in metric.variables}


class _Reading:
    """Reads a graph from its end.

    Args:
        known: tensor's name → what it is.
        reduced: what stands for a reduction of Keras's → what it reduces: values, weights, mask.
    """

    def __init__(self, known: dict[str, str], reduced: dict[str, list[Any]]) -> None:
        self._known, self._reduced = known, reduced

    def of(self, tensor: Any) -> str:
        """Return what a tensor is."""
        if tensor.name in self._reduced:
            return MEAN if {self.of(each) for each in self._reduced[tensor.name]} == {ROWS} else UNKNOWN
        if tensor.name not in self._known:
            operation = tensor.op
            inputs = [self.of(each) for each in operation.inputs]
            self._known[tensor.name] = _read(operation, inputs, tensor)
        return self._known[tensor.name]


def _read(operation: Any, inputs: list[str], out: Any) -> str:
    """Return what an operation makes of its inputs."""
    kind = operation.type
    if not inputs or set(inputs) == {SAME}:
        fixed = kind in ("ReadVariableOp", "VarHandleOp", "ResourceGather") or not operation.op_def.is_stateful
        return SAME if fixed and kind != "Placeholder" else UNKNOWN
    if UNKNOWN in inputs:
        return UNKNOWN
    if kind in ("Identity", "Snapshot", "PreventGradient"):
        return inputs[0]
    if kind == "IdentityN":
        return inputs[out.value_index]
    if set(inputs) <= {SAME, ROWS}:
        return _of_rows(operation, inputs, out)
    if SHAPE in inputs:
        return _of_shape(operation, inputs, out)
    return _of_sums(operation, inputs)


def _of_rows(operation: Any, inputs: list[str], out: Any) -> str:
    """Return what comes of rows, and of what is the same for all of them."""
    kind = operation.type
    given = list(operation.inputs)
    if kind in _ELEMENTWISE:
        return ROWS if all(_lies_beside(*each, out) for each in zip(given, inputs, strict=True)) else UNKNOWN
    if kind in _REDUCTIONS:
        return _reduced(operation, inputs)
    if inputs[0] == ROWS and set(inputs[1:]) <= {SAME}:
        if kind in _BY_ROW and (kind != "OneHot" or operation.get_attr("axis") != 0):
            return ROWS
        if kind == "MatMul":
            return UNKNOWN if operation.get_attr("transpose_a") else ROWS
        if kind in ("Shape", "Size"):
            return SHAPE if kind == "Shape" else COUNT
        return ROWS if _keeps_rows(operation, given[0], out) else UNKNOWN
    if kind in ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits") and set(inputs) == {ROWS}:
        return ROWS
    if kind == "GatherV2" and inputs == [SAME, ROWS, SAME] and _constant(given[2]) == 0:
        return ROWS
    if kind == "ConcatV2" and set(inputs[:-1]) == {ROWS} and _axis(given[-1], out) not in (0, None):
        return ROWS
    return UNKNOWN


def _lies_beside(tensor: Any, what: str, out: Any) -> bool:
    """Return whether an operand of an elementwise operation lies beside the rows of its output."""
    rank = tensor.shape.rank
    if rank is None or out.shape.rank is None:
        return False
    if what == ROWS:
        return bool(rank == out.shape.rank)
    return bool(rank < out.shape.rank or tensor.shape[0] == 1)


def _reduced(operation: Any, inputs: list[str]) -> str:
    tensor, axes = operation.inputs[0], _constant(operation.inputs[1])
    if inputs[0] != ROWS or axes is None or tensor.shape.rank is None:
        return UNKNOWN
    places = {int(each) % tensor.shape.rank for each in axes.reshape(-1)}
    if 0 not in places:
        return ROWS
    return {"Mean": MEAN, "Sum": SUM}.get(operation.type, UNKNOWN)


def _keeps_rows(operation: Any, tensor: Any, out: Any) -> bool:
    """Return whether an operation that moves elements leaves each row's together, in the rows' order."""
    kind = operation.type
    if kind == "Reshape":
        inner, outer = tensor.shape[1:], out.shape[1:]
        if out.shape.rank is None or not (inner.is_fully_defined() and outer.is_fully_defined()):
            return False
        return out.shape.rank > 0 and out.shape[0] is None and math.prod(inner) % max(math.prod(outer), 1) == 0
    if kind == "ExpandDims":
        return _axis(operation.inputs[1], out) not in (0, None)
    if kind == "Squeeze":
        dims = operation.get_attr("squeeze_dims")
        return bool(dims) and all(each % tensor.shape.rank for each in dims)
    if kind == "Transpose":
        order = _constant(operation.inputs[1])
        return order is not None and int(order[0]) == 0
    if kind == "StridedSlice":
        names = ("begin", "end", "shrink_axis", "new_axis", "ellipsis")
        masks = [operation.get_attr(f"{each}_mask") & 1 for each in names]
        steps = _constant(operation.inputs[3])
        return masks in ([1, 1, 0, 0, 0], [0, 0, 0, 0, 1]) and steps is not None and all(steps == 1)
    return False


def _of_shape(operation: Any, inputs: list[str], out: Any) -> str:
    """Return what comes of the shape of rows."""
    kind = operation.type
    if kind == "Cast":
        return SHAPE
    if kind == "Prod" and inputs[0] == SHAPE:
        return COUNT
    if kind == "StridedSlice" and inputs[0] == SHAPE and out.shape.rank == 0:
        begin = _constant(operation.inputs[1])
        return UNKNOWN if begin is None else COUNT if int(begin[0]) == 0 else SAME
    return UNKNOWN


def _of_sums(operation: Any, inputs: list[str]) -> str:
    """Return what comes of means and sums over rows: linear operations on them alone are known."""
    kind = operation.type
    if kind == "Sum" and inputs[1] == SAME and inputs[0] in (MEAN, SUM):
        return inputs[0]
    if kind == "Mean" and inputs[1] == SAME and inputs[0] in (MEAN, SUM):
        return inputs[0]
    if kind not in (*_LINEAR, "AddN", "Pack"):
        return UNKNOWN
    plain = [SUM if each == COUNT else each for each in inputs]
    if kind in ("Div", "RealDiv"):
        if inputs[0] in (SUM, COUNT) and inputs[1] == COUNT:
            return MEAN
        return plain[0] if inputs[1] == SAME and inputs[0] in (MEAN, SUM) else UNKNOWN
    if kind == "Mul":
        made = [each for each in plain if each != SAME]
        return made[0] if len(made) == 1 and made[0] in (MEAN, SUM) else UNKNOWN
    if kind in ("Cast", "Reshape", "Squeeze", "ExpandDims", "Neg", "StopGradient"):
        same = set(inputs[1:]) <= {SAME}
        return (inputs[0] if kind == "Cast" else plain[0]) if same else UNKNOWN
    kinds = set(plain)
    if kinds <= {MEAN, SAME}:
        return MEAN
    return SUM if kinds == {SUM} else UNKNOWN


def _constant(tensor: Any) -> Any:
    return tf.get_static_value(tensor)


def _axis(tensor: Any, out: Any) -> int | None:
    """Return an axis of the output, counted from the front; None where it is not known."""
    axis = _constant(tensor)
    return None if axis is None or out.shape.rank is None else int(axis) % out.shape.rank
