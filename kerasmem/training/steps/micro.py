"""One training step on a batch in pieces: gradients added up, one update, the metrics of all rows."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kerasmem.compat.keras_losses import compiled_loss, loss_tracker
from kerasmem.compat.keras_optimizers import set_to_zero, updated_in_turn
from kerasmem.models.freeing import collect
from kerasmem.training.model_state import lend
from kerasmem.training.steps.batches import part, row_count
from kerasmem.training.steps.checks import SUM, has_own_loss
from kerasmem.training.steps.losses import Divisors

_NUMPY_TYPES = (np.float16, np.float32, np.float64, np.int32, np.int64)


class MicroStep:
    """Keras's own training step, taken apart: `accumulate` for each micro-batch, `apply` once.

    The accumulators are one set of gradients; they are made at the first micro-batch, not sooner. Scaled
    losses (`LossScaleOptimizer`) are added up as they are: a gradient that is not finite makes the sum so, and the
    optimizer then leaves out the whole update, once.

    Args:
        model: compiled and built; it has Keras's own `train_step`.
        loss_reduction: "mean" or "sum" for a model with its own `compute_loss`.
        any_rows: whether Keras's pipeline leaves open how many rows a batch has; then the shown losses of a model's
            outputs are means over batches, not over rows.

    Attributes:
        held_bytes: of the accumulators.
        is_updating: whether what runs, or ran out last, is the update, which takes as much whatever a piece has.
    """

    def __init__(self, model: Any, loss_reduction: str | None = None, *, any_rows: bool = False) -> None:
        self.model = model
        self._is_sum = loss_reduction == SUM and has_own_loss(model)
        self._is_told_of_training = "training" in inspect.signature(model.call).parameters
        self._loss, self._loss_tracker = compiled_loss(model), loss_tracker(model)
        self._any_rows = any_rows
        self._divisors = Divisors()
        self._is_known = False
        self._kinds: list[str] = []  # of each gradient: "" for dense, "slices", "none"
        self._accumulators: list[Any] | None = None
        self.held_bytes = 0
        self.is_updating = False
        self._functions: dict[tuple[str, int], Callable[..., Any]] = {}

    def train(self, batch: Any, size: int) -> dict[str, Any]:
        """Train on a batch in micro-batches of `size` rows; the last may have fewer."""
        if self._accumulators is not None:
            self._function("reset", self._reset)()
        logs: dict[str, Any] = {}
        sparse: list[list[Any]] = []
        for piece, share, factors in self._pieces(batch, size):
            logs, slices = self._function("accumulate", self._accumulate, row_count(piece))(piece, share, factors)
            sparse.append([tuple(map(_moved_to_host, each)) for each in slices])
            del slices
        if self.model.trainable_variables:
            whole = [tuple(map(_joined, zip(*some, strict=True))) for some in zip(*sparse, strict=True)]
            self.is_updating = True
            self._function("apply", self._apply)(whole)
        return logs

    def test(self, batch: Any, size: int) -> dict[str, Any]:
        """Evaluate a batch in micro-batches."""
        logs: dict[str, Any] = {}
        for piece, share, factors in self._pieces(batch, size):
            logs = self._function("evaluate", self._evaluate, row_count(piece))(piece, share, factors)
        return logs

    def release(self) -> None:
        """Free the accumulators and the traced functions."""
        if self._functions:
            self._accumulators, self.held_bytes = None, 0
            self._functions.clear()
            collect()

    def _pieces(self, batch: Any, size: int) -> Iterator[tuple[Any, Any, Any]]:
        """Yield each piece, its share of the rows, and the factors of its losses."""
        total = row_count(batch)
        bounds = [(start, min(start + size, total)) for start in range(0, total, size)]
        if not self._is_known:  # tracing tells whether there is anything to count
            first = part(batch, *bounds[0])
            count = self._function("count", self._count, row_count(first))
            getattr(count, "get_concrete_function", count)(first)
            self._is_known = True
        counted: list[list[float]] = [[1.0] * len(self._divisors.kinds)] * len(bounds)
        if self._divisors.needs_counting:
            counted = [self._counted(part(batch, *bound)) for bound in bounds]
        whole = [math.fsum(some) for some in zip(*counted, strict=True)]
        for bound, own in zip(bounds, counted, strict=True):
            rows = bound[1] - bound[0]
            factors = self._divisors.factors(own, whole, rows, total)
            with tf.device("CPU:0"):
                share = tf.constant(np.float32(rows / total))
                weights = tf.constant(np.asarray(factors, np.float32))
            yield part(batch, *bound), share, weights

    def _counted(self, piece: Any) -> list[float]:
        count = self._function("count", self._count, row_count(piece))
        return [float(each) for each in count(piece)]

    def _function(self, name: str, body: Callable[..., Any], rows: int = 0) -> Callable[..., Any]:
        """Return the body as a graph, one for each number of rows."""
        key = (name, rows)
        if key not in self._functions:
            made = body
            if not self.model.run_eagerly:
                made = tf.function(
                    tf.autograph.experimental.do_not_convert(body),
                    reduce_retracing=True,
                    # Counting in a graph leaves out all of the model that masks do not depend on.
                    jit_compile=self.model.jit_compile if name != "count" else False,
                )
            self._functions[key] = made
        return self._functions[key]

    def _forward(self, x: Any, training: bool) -> Any:
        return self.model(x, training=training) if self._is_told_of_training else self.model(x)

    def _count(self, data: Any) -> list[Any]:
        """Return the divisor of each loss, changing nothing."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with keras.StatelessScope(), self._divisors.reading() as found:
            if has_own_loss(self.model):
                predicted = self._forward(x, training=False)
                self.model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=False)
            elif self._loss is not None:
                self._loss(y, self._forward(x, training=False), weight)
        return found

    def _accumulate(self, data: Any, share: Any, factors: Any) -> tuple[Any, list[Any]]:
        """Accumulate the gradients of a piece; return the metrics and the gradients that are slices."""
        model = self.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self._forward(x, training=True)
            loss = self._compute_loss(x, y, predicted, weight, share, factors, training=True)
            scaled = model.optimizer.scale_loss(loss)
            scaled = scaled * tf.cast(share, scaled.dtype)
        trainable = model.trainable_variables
        slices = []
        if trainable:
            slices = self._add(tape.gradient(scaled, [_native(variable) for variable in trainable]), trainable)
        return model.compute_metrics(x, y, predicted, sample_weight=weight), slices

    def _compute_loss(
        self, x: Any, y: Any, predicted: Any, weight: Any, share: Any, factors: Any, *, training: bool
    ) -> Any:
        with self._divisors.weighing(factors), self._counting_batches(share):
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=training)
        if self._is_sum:  # all is weighted by the share of the rows
            loss = loss / ops.cast(share, loss.dtype)
        rows = tf.shape(next(each for each in keras.tree.flatten(x) if each is not None))[0]
        self._loss_tracker.update_state(loss, sample_weight=rows)
        return loss

    @contextlib.contextmanager
    def _counting_batches(self, share: Any) -> Iterator[None]:
        """Weight the shown losses of single outputs by the share of the batch."""
        metrics = self._loss.metrics if self._any_rows and self._loss is not None else ()
        for metric in metrics:

            def update(value: Any, sample_weight: Any = None, own: Any = metric.update_state) -> Any:
                return own(value, sample_weight=share)

            metric.__dict__["update_state"] = update
        try:
            yield
        finally:
            for metric in metrics:
                metric.__dict__.pop("update_state", None)

    def _evaluate(self, data: Any, share: Any, factors: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self._forward(x, training=False)
        self._compute_loss(x, y, predicted, weight, share, factors, training=False)
        return self.model.compute_metrics(x, y, predicted, sample_weight=weight)

    def _add(self, gradients: list[Any], trainable: list[Any]) -> list[Any]:
        """Accumulate dense gradients; return the others as values and indices.

        Optimizers square slices one by one, also if several are of the same row, so their sum would be another
        gradient. Those of all pieces take what those of the whole batch would.
        """
        self._kinds = ["none" if g is None else "slices" if isinstance(g, tf.IndexedSlices) else "" for g in gradients]
        if self._accumulators is None:
            with tf.init_scope():
                self._accumulators = [
                    None if kind else tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                    for kind, variable in zip(self._kinds, trainable, strict=True)
                ]
            made = [each for each in self._accumulators if each is not None]
            self.held_bytes += _bytes_of(made)
        slices = []
        for accumulator, gradient, kind in zip(self._accumulators, gradients, self._kinds, strict=True):
            if kind == "slices":
                slices.append((gradient.values, gradient.indices))
            elif not kind:
                accumulator.assign_add(tf.cast(gradient, accumulator.dtype))
        return slices

    def _reset(self) -> None:
        """Set the accumulators to zero, one after another."""
        done: list[Any] = []
        for accumulator in self._accumulators or ():
            if accumulator is not None:
                with tf.control_dependencies(done):
                    done = [set_to_zero(accumulator)]

    def _apply(self, sparse: list[Any]) -> None:
        trainable = self.model.trainable_variables
        slices = iter(sparse)
        gradients: list[Any] = []
        for accumulator, kind, variable in zip(self._accumulators or (), self._kinds, trainable, strict=True):
            if kind == "slices":
                values, indices = next(slices)
                gradients.append(tf.IndexedSlices(values, indices, tf.constant(list(variable.shape), tf.int32)))
            else:
                gradients.append(None if kind else accumulator.read_value())
        with updated_in_turn():
            self.model.optimizer.apply_gradients(zip(gradients, trainable, strict=True))


def _moved_to_host(tensor: Any) -> Any:
    """Return a part of a gradient out of the device's memory, which the next piece may need; as it is where NumPy
    has no such type."""
    return tensor.numpy() if tensor.dtype.as_numpy_dtype in _NUMPY_TYPES else tensor


def _bytes_of(variables: list[Any]) -> int:
    return sum(each.shape.num_elements() * each.dtype.size for each in variables)


def _joined(parts: Sequence[Any]) -> Any:
    return lend(parts) if isinstance(parts[0], np.ndarray) else tf.concat(parts, 0)


def _native(variable: Any) -> Any:
    return getattr(variable, "value", variable)
