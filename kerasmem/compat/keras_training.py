"""Training in Keras: the loop of `fit`, arguments of `compile`, losses, and updates by optimizers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.patching import patch

_RESUMING = "kerasmem.ResumeTraining and kerasmem.fit(checkpoint=…)"
_EPOCHS = "keras.src.trainers.epoch_iterator:EpochIterator"
NEW_EPOCHS = Borrowed(f"{_EPOCHS}.__init__", feature=_RESUMING)
STEPS = Borrowed(f"{_EPOCHS}._enumerate_iterator", feature=_RESUMING)
STEP_LOGS = Borrowed("keras:Model._get_metrics_result_or_logs", feature="kerasmem.fit(isolated=True)")
_MICRO_BATCHES = "training in micro-batches"
_LOSSES = "keras.src.losses.loss"
REDUCE = Borrowed(f"{_LOSSES}:reduce_weighted_values", feature=_MICRO_BATCHES)
# Returns the weights of a masked mean.
masked_weights = Borrowed(f"{_LOSSES}:apply_mask", feature=_MICRO_BATCHES)
# Returns the adapter by which `fit` reads its data.
data_adapter = Borrowed("keras.src.trainers.data_adapters:get_data_adapter", feature="estimates with data=")
_KERAS = "keras.src.backend.tensorflow.optimizer:TFOptimizer"
_SCALER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_IN_TURN = "an update after micro-batches that takes no more than its largest variable"
UPDATE = Borrowed(f"{_KERAS}._distributed_tf_update_step", feature=_IN_TURN)
DECAY = Borrowed(f"{_KERAS}._apply_weight_decay", feature=_IN_TURN)
FINITE = Borrowed(f"{_SCALER}.check_finite", feature=_IN_TURN)
_BY_ONE_NUMBER = ("Maximum", "Minimum", "Mul", "RealDiv")
_Own = Callable[..., Any]


def is_under_strategy(model: Any) -> bool:
    """Return whether a model was created in the scope of a `tf.distribute` strategy."""
    return getattr(model, "_distribute_strategy", None) is not None


def initial_epoch(model: Any) -> Any:
    """Return the model's override of `initial_epoch`, or None."""
    return getattr(model, "_initial_epoch", None)


def set_initial_epoch(model: Any, epoch: Any) -> None:
    """Override `initial_epoch` of the current `fit` in `on_train_begin`, and of later ones, as `BackupAndRestore` does.

    Raises:
        NotAvailableError: If Keras lacks this override.
    """
    if not hasattr(model, "_initial_epoch"):
        raise NotAvailableError("ResumeTraining does not work with this Keras: a callback cannot choose the epoch")
    model._initial_epoch = epoch


@contextlib.contextmanager
def logs_from_steps(model: Any) -> Iterator[None]:
    """Use the last step's logs as the logs of an epoch, instead of the model's metrics."""
    STEP_LOGS.get()
    model.__dict__["_get_metrics_result_or_logs"] = lambda logs: logs
    try:
        yield
    finally:
        del model.__dict__["_get_metrics_result_or_logs"]


@contextlib.contextmanager
def steps_skipped(epochs: int, count: int, skip: Callable[[Any], object]) -> Iterator[None]:
    """Have the `fit` in progress in this thread skip the first steps of its next epoch.

    Keras counts skipped steps, but does not call callbacks or the training function for them. An `evaluate` or
    `predict` that begins later is not changed. Whole epochs are read as Keras reads them: it starts the data once more
    per epoch if it knows the number of batches, and each start draws another order of a shuffled pipeline.

    Args:
        epochs: whole epochs of the data to read before.
        count: batches of the epoch to skip.
        skip: called with the iterator of the data for each skipped execution of steps.
    """
    later: weakref.WeakSet[Any] = weakref.WeakSet()
    is_done = False

    def note(own: _Own, epoch_iterator: Any, *arguments: Any, **named: Any) -> None:
        later.add(epoch_iterator)
        own(epoch_iterator, *arguments, **named)

    def steps(own: _Own, epoch_iterator: Any) -> Iterator[Any]:
        nonlocal is_done
        is_other, is_done = is_done or epoch_iterator in later, is_done or epoch_iterator not in later
        for _ in range(0 if is_other else epochs):
            with epoch_iterator.catch_stop_iteration():
                for *_, data in own(epoch_iterator):
                    skip(data)
        for first, *last, data in own(epoch_iterator):
            if is_other or first >= count:
                yield first, *last, data
                continue
            has_ended = True
            with epoch_iterator.catch_stop_iteration():
                skip(data)
                has_ended = False
            if has_ended:
                return

    with patch(*NEW_EPOCHS.owner(), note), patch(*STEPS.owner(), steps):
        yield


@contextlib.contextmanager
def epoch_iterators_recorded() -> Iterator[list[Any]]:
    """Yield a list that receives the epoch iterators created in this thread."""
    iterators: list[Any] = []

    def note(own: _Own, epoch_iterator: Any, *arguments: Any, **named: Any) -> None:
        iterators.append(epoch_iterator)
        own(epoch_iterator, *arguments, **named)

    with patch(*NEW_EPOCHS.owner(), note):
        yield iterators


def step_on_data(function: Any) -> Any:
    """Return the `tf.function` for one batch inside a train or test function, or None."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    step: Any = getattr(cells.get("one_step_on_data"), "cell_contents", None)
    step = getattr(step, "__wrapped__", step)
    return step if hasattr(step, "get_concrete_function") else None


def loss_and_metrics_built(model: Any) -> tuple[bool, bool]:
    """Return whether the compiled loss and the compiled metrics are built or missing."""
    parts = (getattr(model, name, None) for name in ("_compile_loss", "_compile_metrics"))
    loss, metrics = (part is None or part.built for part in parts)
    return loss, metrics


def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the loss as the model's step does."""
    return model._compute_loss(*args, **kwargs)


def user_metrics(model: Any) -> Any:
    """Return the `metrics` argument of `compile`, or None."""
    return getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)


def user_loss_weights(model: Any) -> Any:
    """Return the `loss_weights` argument of `compile`, or None."""
    return getattr(getattr(model, "_compile_loss", None), "_user_loss_weights", None)


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return arguments of `compile` with the objects of a compiled model."""
    metrics = getattr(model, "_compile_metrics", None)
    return {
        "optimizer": model.optimizer,
        "loss": model.loss,
        "loss_weights": user_loss_weights(model),
        "metrics": user_metrics(model),
        "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        "run_eagerly": model.run_eagerly,
        "steps_per_execution": model.steps_per_execution,
        "jit_compile": model.jit_compile,
        "auto_scale_loss": getattr(model, "auto_scale_loss", True),
    }


def dataset_batch_size(dataset: Any) -> int | None:
    """Return the batch size of a `tf.data.Dataset` that batches last among its inputs, or None if unknown."""
    import tensorflow as tf

    current = dataset
    while current is not None:
        if (size := getattr(current, "_batch_size", None)) is not None:
            value = tf.get_static_value(size)
            return None if value is None else int(value)
        inputs: Any = getattr(current, "_inputs", list)()
        current = inputs[0] if len(inputs) == 1 else None
    return None


def reduction_replaced(function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace the function by which Keras's losses reduce their values in this thread.

    Args:
        function: function to call with Keras's function, the values, and the keyword arguments `sample_weight`,
            `mask`, `reduction` and `dtype`.
    """

    def reduce_weighted_values(
        original: Callable[..., Any], values: Any, sample_weight: Any = None, mask: Any = None,
        reduction: Any = "sum_over_batch_size", dtype: Any = None,
    ) -> Any:  # fmt: skip
        return function(original, values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)

    return patch(*REDUCE.owner(), reduce_weighted_values)


def loss_and_tracker(model: Any) -> tuple[Any, Any]:
    """Return the compiled loss, or None, and the metric of the total loss.

    Raises:
        NotAvailableError: If Keras lacks these attributes.
    """
    try:
        return model._compile_loss, model._loss_tracker
    except AttributeError as error:
        raise NotAvailableError(f"{_MICRO_BATCHES} does not work with this Keras: {error}") from error


def has_added_losses(layer: Any) -> bool:
    """Return whether the layer itself has called `add_loss`."""
    return bool(getattr(layer, "_losses", None))


@contextlib.contextmanager
def update_in_turn() -> Iterator[None]:
    """Make optimizers update one variable after another in graphs that this thread traces.

    Otherwise, TensorFlow runs independent updates in parallel and holds all their intermediate results. The final
    results are the same, also with scaled losses and clipped gradients. Moving averages and Keras's accumulation of
    gradients still update all variables at once. If Keras lacks the methods to replace, nothing changes.
    """
    turns = _InTurn()
    replacements: dict[Borrowed, _Own] = {UPDATE: turns.update, DECAY: turns.decay, FINITE: turns.check}
    with contextlib.ExitStack() as stack:
        if all(borrowed.exists() for borrowed in replacements):
            for borrowed, function in replacements.items():
                stack.enter_context(patch(*borrowed.owner(), function))
        yield


def set_to_zero(variable: Any) -> Any:
    """Assign zeros to a variable without a constant in the graph, and return the assignment."""
    import tensorflow as tf

    zeros = tf.raw_ops.Empty(shape=variable.shape, dtype=variable.dtype, init=True)
    return variable.assign(zeros, read_value=False)


def _recompute_gradient(gradient: Any) -> Any:
    """Repeat the scaling and clipping of a gradient in its turn."""
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return _recompute_tensor(gradient)
    return tf.IndexedSlices(_recompute_tensor(gradient.values), gradient.indices, gradient.dense_shape)


def _recompute_tensor(gradient: Any) -> Any:
    """Repeat the multiplications, divisions and limits of a gradient.

    Keras applies them to all gradients before the first update. Grappler then prunes the originals, except for those
    that a norm uses.
    """
    import tensorflow as tf

    operation: Any = gradient.op if tf.is_symbolic_tensor(gradient) else None
    kind = getattr(operation, "type", None)
    if kind == "Placeholder":  # in a branch, for an outer tensor
        outside = next((outer for outer, other in getattr(operation.graph, "captures", ()) if other is gradient), None)
        if tf.is_symbolic_tensor(outside):
            return _recompute_tensor(outside)
    if kind in ("Identity", "IdentityN"):  # a sum over a single replica
        return _recompute_tensor(operation.inputs[gradient.value_index])
    if kind in _BY_ONE_NUMBER and operation.inputs[1].shape.num_elements() == 1:
        x, y = operation.inputs
        return getattr(tf.raw_ops, kind)(x=_recompute_tensor(x), y=y)
    return gradient


class _InTurn:
    """Replacements of Keras's functions, with the replaced function as their first argument."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._done: list[Any] = []  # assignments of the previous turn

    def update(self, own: _Own, optimizer: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        for gradient, variable in grads_and_vars:
            with self._turn():
                own(optimizer, distribution, [(_recompute_gradient(gradient), variable)], learning_rate)

    def decay(self, own: _Own, optimizer: Any, variables: Any) -> None:
        for variable in variables:
            with self._turn():
                own(optimizer, [variable])

    def check(self, own: _Own, optimizer: Any, grads: Any) -> Any:
        import tensorflow as tf

        checks: list[Any] = []
        for gradient in grads:
            if gradient is not None:
                with tf.control_dependencies(checks[-1:]):
                    checks.append(own(optimizer, [gradient]))
        return tf.reduce_all(tf.stack(checks))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Make the operations of a variable depend on the assignments of the previous one."""
        import tensorflow as tf

        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        dependencies = self._done if graph is self._graph else []
        before = len(graph.get_operations())
        with graph.control_dependencies(dependencies):
            yield
        self._graph = graph
        assignments = [operation for operation in graph.get_operations()[before:] if not operation.outputs]
        self._done = assignments or dependencies
