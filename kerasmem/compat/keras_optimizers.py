"""How Keras's optimizers go through gradients: their sum over replicas, and one variable updated after another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

Pairs = list[tuple[Any, Any]]  # of a gradient and its variable

# Of Keras's own optimizers those whose update works on each column of a variable by itself; the others take a norm.
ELEMENTWISE = frozenset({
    "SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Lion", "Ftrl",
})  # fmt: skip
MOST_BLOCKS = 16
_NO_SLOTS = ("_variables", "_trainable_variables")
_BY_ONE_NUMBER = ("Maximum", "Minimum", "Mul", "RealDiv")
_INDICES = "_trainable_variables_indices"
_AVERAGES = "_model_variables_moving_average"
_KERAS = "keras.src.backend.tensorflow.optimizer:TFOptimizer"
_SCALER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_FEATURE = "estimates for replicas"
OPTIMIZER = Borrowed(_KERAS, feature=_FEATURE)
_IN_TURN = "an update after micro-batches that takes no more than its largest variable"
UPDATE = Borrowed(
    f"{_KERAS}._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)", feature=_IN_TURN
)
DECAY = Borrowed(f"{_KERAS}._apply_weight_decay(variables)", feature=_IN_TURN)
AVERAGE = Borrowed(f"{_KERAS}._update_model_variables_moving_average(trainable_variables)", feature=_IN_TURN)
INCREMENT = Borrowed(f"{_KERAS}._backend_increment_gradient_accumulators(grads, acc_grads)", feature=_IN_TURN)
RESET = Borrowed(f"{_KERAS}._backend_reset_gradient_accumulators", feature=_IN_TURN)
FINITE = Borrowed(f"{_SCALER}.check_finite(grads)", feature=_IN_TURN)
# tf.Variable makes none while a tf.function is traced for the second time.
VARIABLE = Borrowed("tensorflow.python.ops.resource_variable_ops:ResourceVariable", feature=_IN_TURN)
SCALER = Borrowed(_SCALER, feature=_IN_TURN)
SUM = Borrowed(f"{_KERAS}._all_reduce_sum_gradients(grads_and_vars)", feature=_FEATURE)


@contextlib.contextmanager
def gradients_summed_by(function: Callable[[Pairs], Pairs]) -> Iterator[None]:
    """Have optimizers sum their gradients by a function in this thread, while the context lasts."""

    def summed(optimizer: Any, grads_and_vars: Any) -> Pairs:
        return function(list(grads_and_vars))

    with mock.patch.object(OPTIMIZER.get(), "_all_reduce_sum_gradients", _in_this_thread(summed, SUM.get())):
        yield


@contextlib.contextmanager
def updated_in_turn(*, in_blocks: bool = True) -> Iterator[list[Any]]:
    """Have optimizers update one variable after another in the graphs that this thread traces meanwhile.

    TensorFlow runs what does not depend on one another at once, so that all variables' intermediate results are there
    together. The arithmetic stays the same, that of a scaled loss's and of clipped gradients too. If Keras does not
    have what this takes, nothing changes.

    Args:
        in_blocks: whether a variable whose gradient is more slices than it has rows is updated a block of columns
            after another. Not for XLA, which would hold what is copied.

    Yields:
        The variables that stand in for such blocks; they must live as long as the graphs.
    """
    try:
        turns = _InTurn(in_blocks=in_blocks)
    except NotAvailableError:
        yield []
        return
    with contextlib.ExitStack() as stack:
        for borrowed, function in turns.functions.items():
            cls, name = (SCALER if borrowed is FINITE else OPTIMIZER).get(), borrowed.name.split(".")[1]
            stack.enter_context(mock.patch.object(cls, name, _in_this_thread(function, borrowed.get())))
        yield turns.stand_ins


def set_to_zero(variable: Any) -> Any:
    """Set a variable to zero without a constant in the graph, and return the assignment."""
    import tensorflow as tf

    zeros = tf.raw_ops.Empty(shape=variable.shape, dtype=variable.dtype, init=True)
    return variable.assign(zeros, read_value=False)


def _in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` in this thread and `elsewhere` in others."""
    owner = threading.get_ident()

    def chosen(*arguments: Any) -> Any:
        return (function if threading.get_ident() == owner else elsewhere)(*arguments)

    return chosen


def is_one_of(optimizer: Any, names: frozenset[str]) -> bool:
    """Return whether an optimizer is Keras's own and has one of these names."""
    cls = type(optimizer)
    return cls.__name__ in names and cls.__module__.startswith("keras.src.optimizers.")


def slots_of(optimizer: Any, index: int) -> dict[str, Any]:
    """Return the variables that an optimizer keeps for the one of a number, by the attributes that list them."""
    lists = {name: each for name, each in vars(optimizer).items() if name not in _NO_SLOTS and isinstance(each, list)}
    return {name: each[index] for name, each in lists.items() if len(each) > index and hasattr(each[index], "value")}


def _block_count(optimizer: Any, gradient: Any, variable: Any) -> int:
    """Return the blocks of columns to update a variable in: one, unless its gradient is of more rows than it has."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices) or not is_one_of(optimizer, ELEMENTWISE):
        return 1
    slices, (rows, *others) = gradient.values.shape[0], variable.shape
    wanted = MOST_BLOCKS if slices is None else -(-slices // max(rows, 1))
    return min(wanted, MOST_BLOCKS, others[-1]) if others else 1


_Block = tuple["slice | None", Any]  # columns, None for all, and what is updated


class _Blocks:
    """A variable and its slots in blocks of columns, each copied to variables that stand in for it, and back.

    What an elementwise optimizer makes of a block is to the bit what it makes of those columns: sums over slices of
    the same row go through them in the same order.
    """

    def __init__(
        self, optimizer: Any, variable: Any, count: int, new_variable: Callable[..., Any], stand_ins: list[Any]
    ) -> None:
        self._optimizer, self._variable, self._count = optimizer, variable, count
        self._new_variable, self._stand_ins = new_variable, stand_ins

    def __iter__(self) -> Iterator[contextlib.AbstractContextManager[_Block]]:
        if self._count == 1:
            yield contextlib.nullcontext((None, self._variable))
            return
        optimizer, last = self._optimizer, self._variable.shape[-1]
        index = optimizer._get_variable_index(self._variable)
        slots = slots_of(optimizer, index)
        wholes = [self._variable, *(each.value for each in slots.values())]
        width, made = -(-last // self._count), dict[int, list[Any]]()
        for start in range(0, last, width):
            columns = slice(start, min(start + width, last))
            size = columns.stop - start
            parts = made.get(size) or made.setdefault(size, self._made(wholes, size))
            yield self._standing_in(columns, index, list(slots), wholes, parts)

    def _made(self, wholes: list[Any], size: int) -> list[Any]:
        import tensorflow as tf

        new = self._new_variable
        with tf.init_scope():
            parts = [new(tf.zeros([*each.shape[:-1], size], each.dtype), trainable=False) for each in wholes]
        self._stand_ins += parts
        return parts

    @contextlib.contextmanager
    def _standing_in(
        self, columns: slice, index: int, names: list[str], wholes: list[Any], parts: list[Any]
    ) -> Iterator[_Block]:
        optimizer = self._optimizer
        for whole, part in zip(wholes, parts, strict=True):
            part.assign(whole[..., columns], read_value=False)
        changed: dict[str, Any] = {name: list(vars(optimizer)[name]) for name in names}
        for name, part in zip(names, parts[1:], strict=True):
            changed[name][index] = part
        changed[_INDICES] = {**vars(optimizer)[_INDICES], optimizer._var_key(parts[0]): index}
        with mock.patch.dict(vars(optimizer), changed):
            yield columns, parts[0]
        for whole, part in zip(wholes, parts, strict=True):
            whole[..., columns].assign(part)


def _part(gradient: Any, columns: slice | None, variable: Any) -> Any:
    """Return a gradient's columns, all if None are given, made once more if they are asked for."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return _made_again(gradient, columns)
    shape = gradient.dense_shape if columns is None else tf.constant(list(variable.shape), tf.int32)
    return tf.IndexedSlices(_made_again(gradient.values, columns), gradient.indices, shape)


def _made_again(gradient: Any, columns: slice | None = None) -> Any:
    """Return a gradient with what it was multiplied or divided by, limited or added to, done again if it is asked
    for.

    Keras does that to all gradients before the first update. Of what it made nothing is left in the graph then, but
    for what a norm is taken of.
    """
    import tensorflow as tf

    operation: Any = gradient.op if tf.is_symbolic_tensor(gradient) else None
    kind = getattr(operation, "type", None)
    if kind == "Placeholder":  # of a branch, for a tensor from outside
        outside = next((one for one, other in getattr(operation.graph, "captures", ()) if other is gradient), None)
        if tf.is_symbolic_tensor(outside):
            return _made_again(outside, columns)
    if kind in ("Identity", "IdentityN"):  # a sum over the one replica there is
        return _made_again(operation.inputs[gradient.value_index], columns)
    if kind in _BY_ONE_NUMBER and operation.inputs[1].shape.num_elements() == 1:
        x, y = operation.inputs
        return getattr(tf.raw_ops, kind)(x=_made_again(x, columns), y=y)
    if kind == "AddV2" and operation.inputs[0].shape == operation.inputs[1].shape:  # to what accumulates in Keras
        x, y = operation.inputs
        return tf.raw_ops.AddV2(x=_made_again(x, columns), y=_made_again(y, columns))
    return gradient if columns is None else gradient[..., columns]


class _InTurn:
    """Replacements of Keras's functions.

    Attributes:
        functions: replacements by the borrowed function.
        stand_ins: variables made for blocks.

    Raises:
        NotAvailableError: If Keras does not have what this takes.
    """

    def __init__(self, *, in_blocks: bool) -> None:
        self._in_blocks, self._turns = in_blocks, _Turns()
        self.stand_ins: list[Any] = []
        self.functions: dict[Borrowed, Callable[..., Any]] = {
            UPDATE: self._update, DECAY: self._decay, AVERAGE: self._average, INCREMENT: self._increment,
            RESET: self._reset, FINITE: self._check,
        }  # fmt: skip
        self._own = {function: borrowed.get() for borrowed, function in self.functions.items()}
        self._new_variable = VARIABLE.get()

    def _update(self, optimizer: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        update = self._own[self._update]
        for gradient, variable in grads_and_vars:
            count = _block_count(optimizer, gradient, variable) if self._in_blocks else 1
            for block in _Blocks(optimizer, variable, count, self._new_variable, self.stand_ins):
                with self._turns.next(), block as (columns, own):
                    update(optimizer, distribution, [(_part(gradient, columns, own), own)], learning_rate)

    def _decay(self, optimizer: Any, variables: Any) -> None:
        for each in variables:
            with self._turns.next():
                self._own[self._decay](optimizer, [each])

    def _average(self, optimizer: Any, variables: Any) -> None:
        for variable, one in zip(variables, getattr(optimizer, _AVERAGES, []), strict=False):
            with mock.patch.dict(vars(optimizer), {_AVERAGES: [one]}), self._turns.next():
                self._own[self._average](optimizer, [variable])

    def _increment(self, optimizer: Any, grads: Any, acc_grads: Any) -> None:
        for gradient, each in zip(grads, acc_grads, strict=True):
            with self._turns.next():
                self._own[self._increment](optimizer, [_part(gradient, None, each)], [each])

    def _reset(self, optimizer: Any) -> None:
        for each in optimizer._accumulated_gradients:
            if each is not None:
                with self._turns.next():
                    set_to_zero(each.value)

    def _check(self, optimizer: Any, grads: Any) -> Any:
        import tensorflow as tf

        found: list[Any] = []
        for each in grads:
            if each is not None:
                with tf.control_dependencies(found[-1:]):
                    found.append(self._own[self._check](optimizer, [each]))
        return tf.reduce_all(tf.stack(found))


class _Turns:
    """Makes the operations of one variable wait for the assignments of the one before."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._done: list[Any] = []

    @contextlib.contextmanager
    def next(self) -> Iterator[None]:
        """Make new operations wait for the turn before."""
        import tensorflow as tf

        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        waits_for = self._done if graph is self._graph else []
        before = len(graph.get_operations())
        with graph.control_dependencies(waits_for):
            yield
        self._graph = graph
        made = [each for each in graph.get_operations()[before:] if not each.outputs]  # assignments
        self._done = made or waits_for
