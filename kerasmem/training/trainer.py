"""The function that Keras's `fit` calls for a step, and the callbacks around those of the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kerasmem.compat.keras_training import logs_from_steps
from kerasmem.diagnosis.explaining import read_exception
from kerasmem.errors import ModelError, UsageError, warn_user
from kerasmem.models.freeing import drop_frames
from kerasmem.training.checkpoint import SAVE_FREQ, Checkpoint, SavingCallback
from kerasmem.training.run_state import WEIGHTS, RunState, load_state, read_state
from kerasmem.training.sources import pass_batches
from kerasmem.training.steps.batches import has_any_rows, row_count, without_optionals
from kerasmem.training.steps.driver import Driver
from kerasmem.training.steps.engine import LocalEngine, RanOut, build_step
from kerasmem.training.steps.remote import Engine, RemoteEngine
from kerasmem.training.steps.splitting import nothing_fits

_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


@dataclass(frozen=True)
class FitOptions:
    """Checked arguments of `kerasmem.fit` beyond those of `model.fit`.

    Attributes:
        micro_batches: pieces of a batch from the start; None for whole batches.
        checkpoint: absolute path; None for no checkpoint.
        save_freq: batches between two checkpoints.
        keep: whether the file is kept at the end.
        isolated: whether steps run in a separate process.
        falls_back: whether steps run in this process if the model cannot be built in a separate one.
    """

    micro_batches: int | None = None
    checkpoint: str | None = None
    save_freq: int = SAVE_FREQ
    keep: bool = False
    isolated: bool = False
    falls_back: bool = False

    def piece_rows(self, run: RunState, rows: int) -> int | None:
        """Return the rows of a piece of a batch of `rows`, or None for whole batches."""
        pieces = None if self.micro_batches is None else -(-rows // self.micro_batches)
        return min((size for size in (pieces, run.micro_batch_rows) if size is not None), default=None)


def mark_replacement(function: Any) -> Any:
    """Mark a function as the replacement of Keras's."""
    function.is_kerasmem = True
    return function


class Trainer(keras.callbacks.Callback):
    """Runs the steps of one call of `kerasmem.fit`. It is also the callback before the user's.

    Args:
        model: compiled.
        run: position of the run; the saving callback updates it.
        options: arguments of `kerasmem.fit`.
        checkpoint: file of the run, with the position in its data; None for no checkpoint.
    """

    def __init__(self, model: Any, run: RunState, options: FitOptions, checkpoint: Checkpoint | None = None) -> None:
        super().__init__()
        self.set_model(model)
        self.run, self.isolated, self.checkpoint = run, options.isolated, checkpoint
        self.source = None if checkpoint is None else checkpoint.source
        self.driver: Driver | None = None
        self._options = options
        self._keras_train = model.train_function  # traced already, if the model was trained before
        self._keras_test = model.test_function
        self.to_restore = checkpoint is not None and checkpoint.saved is not None
        self._is_epochs_first = True
        self._any_rows = False
        self._callbacks_watch_batches = False
        self._rate: float | None = None

    # ---- around `fit`

    @contextlib.contextmanager
    def in_place(self, callbacks: list[Any]) -> Iterator[None]:
        """Replace Keras's functions of the model, and restore them with the last weights at the end.

        Args:
            callbacks: the user's callbacks.
        """
        base = keras.callbacks.Callback
        self._callbacks_watch_batches = any(
            name in vars(callback) or getattr(type(callback), name) is not getattr(base, name)
            for callback in callbacks
            if not type(callback).__module__.startswith("kerasmem.")
            for name in _HOOKS
        )
        with contextlib.ExitStack() as stack:
            if self.isolated:  # the metrics are in the separate process
                stack.enter_context(logs_from_steps(self.model))
            self.model.train_function = self.train
            try:
                yield
            except BaseException:
                self._rescue()
                raise
            finally:
                self._hand_back()

    def _rescue(self) -> None:
        """Copy the weights of the separate process, or of the last good copy, to the model after an error or Ctrl-C."""
        if self.driver is not None and self.isolated:
            state = self.driver.good
            with contextlib.suppress(RanOut):
                state = self.driver.engine.state()
            if state is not None:
                load_state(self.model, state, WEIGHTS)

    def _hand_back(self) -> None:
        """Restore Keras's functions, including traced ones."""
        engine = None if self.driver is None else self.driver.engine
        if isinstance(engine, LocalEngine):
            self._keras_train, self._keras_test = engine.whole["train"], engine.whole["test"]
        self.model.train_function, self.model.test_function = self._keras_train, self._keras_test
        if engine is not None:
            engine.close()

    # ---- steps

    @mark_replacement
    def train(self, iterator: Any) -> dict[str, Any]:
        """Run the steps of one execution of Keras's training function."""
        logs = None
        for batch in self._batches(iterator):
            if self.source is not None and self.source.is_bare:
                batch = batch[0]
            driver = self.driver or self._begin(batch, iterator)
            if self._is_epochs_first:
                self._copy_changes(driver)
            rate = self._new_rate() if self._is_epochs_first or self._callbacks_watch_batches else None
            self._is_epochs_first = False
            logs = driver.step("train", batch, rate)
        return _logs_of_any(logs)

    @mark_replacement
    def test(self, iterator: Any) -> dict[str, Any]:
        """Run the steps of one execution of Keras's test function, in the validation of this `fit`."""
        assert self.driver is not None
        logs = None
        for batch in self._batches(iterator):
            logs = self.driver.step("test", batch)
        return _logs_of_any(logs)

    def _batches(self, iterator: Any) -> Iterator[Any]:
        """Yield the batches of one execution."""
        for _, batch in zip(range(self.model.steps_per_execution), iterator, strict=False):
            yield without_optionals(batch)

    def _begin(self, batch: Any, iterator: Any) -> Driver:
        """Create all variables and the driver."""
        model, self._any_rows = self.model, has_any_rows(iterator)
        try:
            build_step(model, batch)
        except Exception as error:
            diagnosis = read_exception(error)
            if diagnosis.out_of_memory:  # of weights and the optimizer's slots
                drop_frames(error)
                raise ModelError(nothing_fits(diagnosis.summary, model, 0)) from None
            if not model.built:
                raise UsageError(
                    f"model cannot be built from the shapes of a batch ({error}); call it on a batch before fit"
                ) from error
            raise
        if self.to_restore and self.checkpoint is not None:
            load_state(model, self.checkpoint.state_for(model))
            self.to_restore = False
        self.driver = Driver(
            self._engine(batch),
            model,
            piece_rows=self._options.piece_rows(self.run, row_count(batch)),
            good=read_state(model) if self.isolated else None,
        )
        if self.checkpoint is not None and self.checkpoint.saved is None:
            self.checkpoint.source.check_first(batch)
            self.save()  # a restart before the first regular save needs these weights and this order
        return self.driver

    def _engine(self, batch: Any) -> Engine:
        """Return the engine."""
        model = self.model
        if self.isolated:
            try:
                return RemoteEngine(model, batch, any_rows=self._any_rows)
            except RanOut as failure:
                raise ModelError(f"the training process does not start: {failure}") from None
            except UsageError as error:
                if not self._options.falls_back:
                    raise
                text = f"steps run in this process, so XLA destroys the weights if one runs out of memory: {error}"
                warn_user(text, RuntimeWarning)
                self.isolated = False
        ours, model.train_function = model.train_function, self._keras_train
        try:
            return LocalEngine(model, any_rows=self._any_rows)
        finally:
            model.train_function = ours

    def _new_rate(self) -> float | None:
        """Return the learning rate if it is a variable and has changed."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        variable = getattr(optimizer, "learning_rate", None)
        if not isinstance(variable, keras.Variable):
            return None
        before, self._rate = self._rate, float(keras.ops.convert_to_numpy(variable))
        return self._rate if self._rate != before else None

    def _copy_changes(self, driver: Driver) -> None:
        """Copy weights that callbacks have changed to the driver."""
        if not self.isolated:
            driver.good = None
            return
        here, there = read_state(self.model), driver.copy_state()
        pairs = [pair for group in WEIGHTS for pair in zip(here[group], there[group], strict=True)]
        if not all(np.array_equal(mine, theirs) for mine, theirs in pairs):
            driver.engine.load({**here, "metrics": there["metrics"]})
            driver.good = None

    # ---- hooks of Keras

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the metrics of the separate process too, as Keras has just reset the model's."""
        self._is_epochs_first = True
        if self.driver is not None:
            self.driver.reset_metrics(has_happened=not self.isolated)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Update the model's weights for later callbacks."""
        if self.driver is not None and self.isolated:
            load_state(self.model, self.driver.copy_state(), WEIGHTS)

    def on_test_begin(self, logs: Any = None) -> None:
        """Replace Keras's test function during this `fit`'s validation."""
        if self.driver is None:
            return
        engine = self.driver.engine
        self._keras_test = engine.whole["test"] if isinstance(engine, LocalEngine) else self.model.test_function
        self.model.test_function = self.test
        self.driver.reset_metrics(has_happened=not self.isolated)

    def on_test_end(self, logs: Any = None) -> None:
        """Restore Keras's test function for other evaluations."""
        self.model.test_function = self._keras_test

    def on_train_end(self, logs: Any = None) -> None:
        """Load the saved state into the model if nothing was left to train."""
        checkpoint = self.checkpoint
        if not self.to_restore or checkpoint is None or checkpoint.saved is None:
            return
        if not self.model.built or not self.model.optimizer.built:
            build_step(self.model, checkpoint.source.peek())
        load_state(self.model, checkpoint.state_for(self.model, WEIGHTS), WEIGHTS)

    def save(self) -> None:
        """Write the position and the state of the run."""
        if self.checkpoint is not None and self.driver is not None:
            self.run.micro_batch_rows = self.driver.piece_rows
            self.checkpoint.write(self.run, self.driver.copy_state())


def _logs_of_any(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the logs of an execution, or raise StopIteration at the end of the data, as Keras's function does."""
    if logs is None:
        raise StopIteration
    return logs


class SaveCallback(SavingCallback):
    """Resumes and saves after the user's callbacks.

    Args:
        trainer: of the same `fit`.
        first_epoch: Keras's first epoch of the whole run.
        save_freq: batches from one saving to the next.
    """

    def __init__(self, trainer: Trainer, first_epoch: int, save_freq: int) -> None:
        super().__init__(trainer.run, trainer.source, save_freq)
        self._trainer, self._first_epoch = trainer, first_epoch
        self.epoch_iterators: list[Any] = []
        self._has_epochs = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch's batches from 0."""
        self._has_epochs = True
        super().on_epoch_begin(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Read the data of a finished run again, as a shuffled pipeline may be used by later calls of `fit`."""
        if self._trainer.to_restore and not self._has_epochs and self.source is not None and self.source.reads_skipped:
            self.skipping.close()
            iterator = self.epoch_iterators[0]
            for _ in self.run.epochs:
                with iterator.catch_stop_iteration():
                    for *_, data in iterator:
                        pass_batches(data, self.model.steps_per_execution)

    def on_train_begin(self, logs: Any = None) -> None:
        """Go to the position of an earlier process."""
        if self._trainer.checkpoint is not None and self._trainer.to_restore:
            self.resume(self._trainer.checkpoint, self._first_epoch)
        super().on_train_begin(logs)

    def save(self) -> None:
        """Write the position and the state of the run."""
        self._trainer.save()
