"""Steps in this process, whole or in micro-batches. Running out of memory raises `RanOut`.

Gradients of micro-batches are added up for one update, and metrics count all rows. `divisors` has the weights by which
losses of pieces add up.
"""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.compat.gradients import forget_gradients
from kerasmem.compat.keras_layers import symbolic_build
from kerasmem.compat.keras_training import loss_and_tracker, set_to_zero, step_on_data, update_in_turn
from kerasmem.devices.training_devices import reserve_in_one_piece
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.diagnosis.explaining import read_exception
from kerasmem.models.freeing import collect, drop_frames
from kerasmem.models.own_step import has_call, has_own_step
from kerasmem.training.run_state import ModelState, lend, load_state, read_state
from kerasmem.training.steps.batches import part, row_count
from kerasmem.training.steps.divisors import COUNTED, Divisors, factor

_NUMPY_TYPES = (np.float16, np.float32, np.float64, np.int32, np.int64)


class RanOut(Exception):
    """A step ran out of memory, or its process died.

    Attributes:
        diagnosis: diagnosis of the failure.
        is_certain: whether memory is known to be the reason; a process may have been killed for others.
        is_dead: whether the process of the step is gone or can no longer be trusted.
        is_update: whether the update after the last piece ran out, which needs the same memory for any size of pieces.
        rows: rows of the pieces.
    """

    rows = 0

    def __init__(
        self, diagnosis: Diagnosis, *, is_certain: bool = True, is_dead: bool = False, is_update: bool = False
    ) -> None:
        super().__init__(diagnosis.summary)
        self.diagnosis, self.is_certain, self.is_dead, self.is_update = diagnosis, is_certain, is_dead, is_update


class LocalEngine:
    """Steps in this process, by Keras's function if batches are whole.

    Args:
        model: compiled and built.
        any_rows: whether Keras's pipeline leaves the number of rows open. Defaults to False.

    Attributes:
        whole: Keras's train and test functions, for whole batches.
    """

    def __init__(self, model: Any, *, any_rows: bool = False) -> None:
        self.model = model
        self.whole = {kind: _keras_function(model, kind) for kind in ("train", "test")}
        self._micro = MicroStep(model)
        self._untraced = {"train", "test"} if any_rows and not model.run_eagerly else set()
        reserve_in_one_piece()

    def step(self, kind: str, batch: Any, size: int) -> dict[str, Any]:
        """Train ("train") or evaluate ("test") a batch in pieces of up to `size` rows."""
        self._micro.is_updating = False
        try:
            if size < row_count(batch):
                logs: dict[str, Any] = getattr(self._micro, kind)(batch, size)
                return logs
            if kind in self._untraced:
                self._untraced.discard(kind)
                _trace_for_any_rows(self.whole[kind], batch)
            return dict(self.whole[kind](iter((batch,))))
        except Exception as error:
            failure = self._read_failure(error)
        raise failure

    def _read_failure(self, error: Exception) -> RanOut:
        """Return the failure after freeing the tensors of the step, or raise another error again."""
        diagnosis = read_exception(error)  # without a search of all objects, as threads prepare batches
        if not isinstance(error, tf.errors.ResourceExhaustedError) and not diagnosis.out_of_memory:
            raise error
        drop_frames(error)
        gc.collect()
        return RanOut(diagnosis, is_dead=bool(self.model.jit_compile), is_update=self._micro.is_updating)

    def state(self) -> ModelState:
        """Return a copy of the variables that steps change."""
        return read_state(self.model)

    def load(self, state: ModelState) -> None:
        """Restore a copy, and free the accumulators."""
        self._micro.release()
        load_state(self.model, state)

    def reset_metrics(self) -> None:
        """Reset the metrics."""
        self.model.reset_metrics()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.model.optimizer.learning_rate = rate

    def close(self) -> None:
        """Free the accumulators."""
        self._micro.release()


def _keras_function(model: Any, kind: str) -> Any:
    """Return Keras's train or test function, or make one if the model has none."""
    name = f"{kind}_function"
    current = getattr(model, name)
    if current is not None and not getattr(current, "is_kerasmem", False):
        return current
    getattr(model, f"make_{kind}_function")(force=True)
    function = getattr(model, name)
    setattr(model, name, current)
    return function


def build_step(model: Any, batch: Any) -> None:
    """Create all variables that the first training step would create.

    A custom step is traced once, as it may have optimizers and layers that Keras does not know.
    """
    is_own = has_own_step(model)
    try:
        if has_call(model):
            symbolic_build(model, data_batch=batch)
    except Exception:
        if not is_own:
            raise
    if is_own:
        step = step_on_data(_keras_function(model, "train"))
        if step is None:  # run eagerly
            step = tf.function(model.train_step, autograph=False)
        forget_gradients(step.get_concrete_function(batch).graph)


def _trace_for_any_rows(function: Any, batch: Any) -> None:
    """Trace Keras's function for any number of rows, as Keras does."""
    step = step_on_data(function)
    if step is not None and all(map(tf.is_tensor, keras.tree.flatten(batch))):  # not with None, sparse or ragged parts
        step.get_concrete_function(
            keras.tree.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), batch)
        )


class MicroStep:
    """Keras's training step in two parts: `accumulate` for each micro-batch, and `apply` once.

    The accumulators hold one set of gradients, and are created at the first micro-batch. Scaled losses
    (`LossScaleOptimizer`) are added up unchanged: if a gradient is not finite, the sum is not finite, and the optimizer
    skips the whole update once.

    Args:
        model: compiled and built; it has Keras's `train_step` and `compute_loss`.

    Attributes:
        accumulators: a variable for each trainable weight, or None if its gradient is slices.
        is_updating: whether the update runs, or ran out last.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self._loss, self._loss_tracker = loss_and_tracker(model)
        self._divisors = Divisors()
        self._has_divisors = False
        self._kinds: list[str] = []  # of each gradient: "" for dense, "slices", "none"
        self.accumulators: list[Any] = []
        self.is_updating = False
        self._functions: dict[tuple[str, int], Callable[..., Any]] = {}

    def train(self, batch: Any, size: int) -> dict[str, Any]:
        """Train on a batch in micro-batches of `size` rows. The last may have fewer."""
        if self.accumulators:
            self._function("reset", self._reset)()
        logs: dict[str, Any] = {}
        sparse: list[list[Any]] = []
        for piece, share, factors in self._pieces(batch, size):
            logs, slices = self._function("accumulate", self.accumulate, row_count(piece))(piece, share, factors)
            sparse.append([tuple(map(_move_to_host, pair)) for pair in slices])
            del slices
        if self.model.trainable_variables:
            whole = [tuple(map(_concatenate, zip(*pairs, strict=True))) for pairs in zip(*sparse, strict=True)]
            self.is_updating = True
            self._function("apply", self.apply)(whole)
        return logs

    def test(self, batch: Any, size: int) -> dict[str, Any]:
        """Evaluate a batch in micro-batches."""
        logs: dict[str, Any] = {}
        for piece, _, factors in self._pieces(batch, size):
            logs = self._function("evaluate", self._evaluate, row_count(piece))(piece, factors)
        return logs

    def release(self) -> None:
        """Free the accumulators and the traced functions."""
        if self._functions:
            self.accumulators = []
            self._functions.clear()
            collect()

    def _pieces(self, batch: Any, size: int) -> Iterator[tuple[Any, Any, Any]]:
        """Yield each piece with its share of the rows and the factors of its losses."""
        total = row_count(batch)
        bounds = [(start, min(start + size, total)) for start in range(0, total, size)]
        if not self._has_divisors:  # tracing finds the kinds of divisors
            first = part(batch, *bounds[0])
            count = self._function("count", self._count, row_count(first))
            getattr(count, "get_concrete_function", count)(first)
            self._has_divisors = True
        counted: list[list[float]] = [[1.0] * len(self._divisors.kinds)] * len(bounds)
        if COUNTED in self._divisors.kinds:
            counted = [self._read_divisors(part(batch, *bound)) for bound in bounds]
        whole = [math.fsum(divisors) for divisors in zip(*counted, strict=True)]
        for bound, own in zip(bounds, counted, strict=True):
            rows = bound[1] - bound[0]
            divisors = zip(self._divisors.kinds, own, whole, strict=True)
            factors = [factor(*divisor, total / rows) for divisor in divisors]
            with tf.device("CPU:0"):
                share = tf.constant(np.float32(rows / total))
                weights = tf.constant(np.asarray(factors, np.float32))
            yield part(batch, *bound), share, weights

    def _read_divisors(self, piece: Any) -> list[float]:
        count = self._function("count", self._count, row_count(piece))
        return [float(divisor) for divisor in count(piece)]

    def _function(self, name: str, body: Callable[..., Any], rows: int = 0) -> Callable[..., Any]:
        """Return the body as a graph for a number of rows."""
        key = (name, rows)
        if key not in self._functions:
            function = body
            if not self.model.run_eagerly:
                function = tf.function(
                    tf.autograph.experimental.do_not_convert(body),
                    reduce_retracing=True,
                    # A graph of divisors omits the parts of the model that masks do not depend on.
                    jit_compile=self.model.jit_compile if name != "count" else False,
                )
            self._functions[key] = function
        return self._functions[key]

    def _forward(self, x: Any, training: bool) -> Any:
        return self.model(x, training=training) if self._takes_training else self.model(x)

    def _count(self, data: Any) -> list[Any]:
        """Return the divisor of each loss without changing variables."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with keras.StatelessScope(), self._divisors.collect_divisors() as divisors:
            if self._loss is not None:
                self._loss(y, self._forward(x, training=False), weight)
        return divisors

    def accumulate(self, data: Any, share: Any, factors: Any) -> tuple[Any, list[Any]]:
        """Accumulate the gradients of a piece, and return the metrics and the gradients that are slices.

        Args:
            data: the piece.
            share: share of the batch's rows.
            factors: factors of the losses; None for 1.
        """
        model = self.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self._forward(x, training=True)
            loss = self._compute_loss(x, y, predicted, weight, factors, training=True)
            scaled = model.optimizer.scale_loss(loss)
            scaled = scaled * tf.cast(share, scaled.dtype)
        trainable = model.trainable_variables
        slices = []
        if trainable:
            slices = self._add(tape.gradient(scaled, [variable.value for variable in trainable]), trainable)
        return model.compute_metrics(x, y, predicted, sample_weight=weight), slices

    def _compute_loss(self, x: Any, y: Any, predicted: Any, weight: Any, factors: Any, *, training: bool) -> Any:
        with self._divisors.multiply_results(factors):
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=training)
        rows = tf.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
        self._loss_tracker.update_state(loss, sample_weight=rows)
        return loss

    def _evaluate(self, data: Any, factors: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self._forward(x, training=False)
        self._compute_loss(x, y, predicted, weight, factors, training=False)
        return self.model.compute_metrics(x, y, predicted, sample_weight=weight)

    def _add(self, gradients: list[Any], trainable: list[Any]) -> list[Any]:
        """Accumulate dense gradients, and return slices as values and indices.

        Optimizers square slices one by one, even if several have the same row, so their sum would be another gradient.
        The slices of all pieces need the memory of those of the whole batch.
        """
        self._kinds = ["none" if g is None else "slices" if isinstance(g, tf.IndexedSlices) else "" for g in gradients]
        if not self.accumulators:
            with tf.init_scope():
                self.accumulators = [
                    None if kind else keras.Variable("zeros", variable.shape, variable.dtype, trainable=False).value
                    for kind, variable in zip(self._kinds, trainable, strict=True)
                ]
        slices = []
        for accumulator, gradient, kind in zip(self.accumulators, gradients, self._kinds, strict=True):
            if kind == "slices":
                slices.append((gradient.values, gradient.indices))
            elif not kind:
                accumulator.assign_add(tf.cast(gradient, accumulator.dtype))
        return slices

    def _reset(self) -> None:
        """Set the accumulators to zero, one after another."""
        done: list[Any] = []
        for accumulator in self.accumulators:
            if accumulator is not None:
                with tf.control_dependencies(done):
                    done = [set_to_zero(accumulator)]

    def apply(self, sparse: Sequence[Sequence[Any]]) -> None:
        """Update the weights from the accumulators and the slices."""
        trainable = self.model.trainable_variables
        slices = iter(sparse)
        gradients: list[Any] = []
        for accumulator, kind, variable in zip(self.accumulators, self._kinds, trainable, strict=True):
            if kind == "slices":
                values, indices = next(slices)
                gradients.append(tf.IndexedSlices(values, indices, tf.constant(list(variable.shape), tf.int32)))
            else:
                gradients.append(None if kind else accumulator.read_value())
        with update_in_turn():
            self.model.optimizer.apply_gradients(zip(gradients, trainable, strict=True))


def _move_to_host(tensor: Any) -> Any:
    """Move a part of a gradient out of the device's memory if NumPy has its type."""
    return tensor.numpy() if tensor.dtype.as_numpy_dtype in _NUMPY_TYPES else tensor


def _concatenate(parts: Sequence[Any]) -> Any:
    return lend(parts) if isinstance(parts[0], np.ndarray) else tf.concat(parts, 0)
