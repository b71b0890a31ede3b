"""Steps in this process. Running out of memory is raised as `RanOut`, other errors as they are."""

from __future__ import annotations

import gc
from typing import Any

from kerasmem.compat.gradients import forget_gradients
from kerasmem.compat.keras_fit import step_on_data
from kerasmem.compat.keras_layers import symbolic_build
from kerasmem.devices.room import in_use_reader, reserve_in_one_piece
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.diagnosis.explaining import read_exception
from kerasmem.models.freeing import drop_frames
from kerasmem.models.own_step import has_call, has_own_step
from kerasmem.training.model_state import ModelState, load_state, read_state
from kerasmem.training.steps.batches import first_replica, part, row_count
from kerasmem.training.steps.checks import division_obstacle
from kerasmem.training.steps.micro import MicroStep


class RanOut(Exception):
    """A step had too little memory, or its process died.

    Attributes:
        diagnosis: what is known of it.
        is_certain: whether it is known to be memory; a process that was killed may have been for other reasons.
        is_dead: the process that ran it can no longer be trusted, or is gone.
        is_update: it was the update after the last piece, which takes as much whatever a piece has.
    """

    def __init__(
        self, diagnosis: Diagnosis, *, is_certain: bool = True, is_dead: bool = False, is_update: bool = False
    ) -> None:
        super().__init__(diagnosis.summary)
        self.diagnosis, self.is_certain, self.is_dead, self.is_update = diagnosis, is_certain, is_dead, is_update


class LocalEngine:
    """Steps in this process: Keras's own function as long as batches are whole.

    Args:
        model: compiled and built.
        loss_reduction: "mean" or "sum" for a model with its own `compute_loss`.
        any_rows: whether Keras's pipeline leaves open how many rows a batch has.

    Attributes:
        whole: Keras's functions that train and test a whole batch.
    """

    def __init__(self, model: Any, loss_reduction: str | None = None, *, any_rows: bool = False) -> None:
        self.model, self._loss_reduction = model, loss_reduction
        self.whole = {kind: _keras_function(model, kind) for kind in ("train", "test")}
        self._micro = MicroStep(model, loss_reduction, any_rows=any_rows)
        self._open = {"train", "test"} if any_rows and not model.run_eagerly else set()
        self._in_use = in_use_reader()
        self._most_before = 0  # bytes that were in use before a step, beside what micro-batches keep
        reserve_in_one_piece()

    def step(self, kind: str, batch: Any, size: int) -> dict[str, Any]:
        """Train ("train") or evaluate ("test") a batch in pieces of `size` rows, or whole if it has no more.

        If a batch cannot be divided with the same result, its pieces are batches of their own.
        """
        self._most_before = max(self._most_before, self._in_use() - self._micro.held_bytes)
        self._micro.is_updating = False
        try:
            total = row_count(batch)
            if size < total and division_obstacle(self.model, kind, self._loss_reduction) is None:
                logs: dict[str, Any] = getattr(self._micro, kind)(batch, size)
                return logs
            if size < total:
                pieces = [part(batch, start, min(start + size, total)) for start in range(0, total, size)]
                return [dict(self.whole[kind](iter((piece,)))) for piece in pieces][-1]
            if kind in self._open:
                self._open.discard(kind)
                _trace_for_any_rows(self.whole[kind], batch)
            return dict(self.whole[kind](iter((batch,))))
        except Exception as error:
            found = self._explained(error)
        raise found

    def _explained(self, error: Exception) -> RanOut:
        """Return the failure after freeing the tensors of the step; raise other errors."""
        diagnosis = read_exception(error)  # threads that make batches run: no look at all objects
        if not diagnosis.out_of_memory:
            raise error
        drop_frames(error)
        gc.collect()
        return RanOut(diagnosis, is_dead=bool(self.model.jit_compile), is_update=self._micro.is_updating)

    def state(self) -> ModelState:
        """Return a copy of all that steps change."""
        return read_state(self.model)

    def load(self, state: ModelState, *, releases: bool = True) -> None:
        """Go back to a copy, and free the accumulators unless a successful step is undone."""
        if releases:
            self._micro.release()
        load_state(self.model, state)

    def other_bytes(self, state_bytes: int) -> int:
        """Return the bytes in use besides a state, or 0 if unknown.

        Pipelines hold more or fewer batches from step to step; the most that was seen before a step counts.
        """
        return max(0, self._in_use() - state_bytes, self._most_before - state_bytes)

    def reset_metrics(self) -> None:
        """Reset the metrics."""
        self.model.reset_metrics()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.model.optimizer.learning_rate = rate

    def close(self) -> None:
        """Give the accumulators back."""
        self._micro.release()


def _keras_function(model: Any, kind: str) -> Any:
    """Return Keras's function that trains or tests, made anew if the model has none."""
    name = f"{kind}_function"
    present = getattr(model, name)
    if present is not None and not getattr(present, "is_kerasmem", False):
        return present
    getattr(model, f"make_{kind}_function")(force=True)
    made = getattr(model, name)
    setattr(model, name, present)
    return made


def build_step(model: Any, batch: Any) -> None:
    """Make all variables that the first training step would make.

    A step of the model's own is traced once for that: it may have optimizers, and layers, that Keras knows nothing of.
    """
    batch = first_replica(batch)
    is_own = has_own_step(model)
    try:
        if has_call(model):
            symbolic_build(model, batch)
    except Exception:
        if not is_own:
            raise
    if is_own:
        import tensorflow as tf

        step = step_on_data(_keras_function(model, "train"))
        if step is None:  # run eagerly
            step = tf.function(model.train_step, autograph=False)
        forget_gradients(step.get_concrete_function(batch).graph)


def _trace_for_any_rows(function: Any, batch: Any) -> None:
    """Trace Keras's function for any number of rows, as Keras does."""
    import keras
    import tensorflow as tf

    step = step_on_data(function)
    if step is not None and all(map(tf.is_tensor, keras.tree.flatten(batch))):  # not None, sparse or ragged parts
        step.get_concrete_function(
            keras.tree.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), batch)
        )
