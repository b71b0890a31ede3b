"""The function that Keras's `fit` calls for a step, and the callbacks around those of the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kerasmem.compat.keras_training import logs_from_steps, record_epoch_iterator
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
        keep: whether the file stays at the end.
        isolated: whether steps run in a process of their own.
        falls_back: whether steps run in this process if the model cannot be made in another one.
    """

    micro_batches: int | None = None
    checkpoint: str | None = None
    save_freq: int = SAVE_FREQ
    keep: bool = False
    isolated: bool = False
    falls_back: bool = False

    def piece_rows(self, run: RunState, rows: int) -> int | None:
        """Return the rows of a piece of a batch of `rows`, or None for whole batches; an earlier process may know."""
        pieces = None if self.micro_batches is None else -(-rows // self.micro_batches)
        return min((size for size in (pieces, run.micro_batch_rows) if size is not None), default=None)


def stands_in(function: Any) -> Any:
    """Mark a function that Keras calls in place of its own."""
    function.is_kerasmem = True
    return function


class Trainer(keras.callbacks.Callback):
    """Takes the steps of one call of `kerasmem.fit`, and is the callback that comes before the user's.

    Args:
        model: compiled.
        run: position of the run; the saving callback updates it.
        first_epoch: that the whole run began with.
        options: of `kerasmem.fit`.
        checkpoint: file of the run, with the position in its data; None for no checkpoint.
    """

    def __init__(
        self, model: Any, run: RunState, first_epoch: int, options: FitOptions, checkpoint: Checkpoint | None = None
    ) -> None:
        super().__init__()
        self.set_model(model)
        self.run, self.isolated, self.checkpoint = run, options.isolated, checkpoint
        self.source = None if checkpoint is None else checkpoint.source
        self.driver: Driver | None = None
        self._first_epoch, self._options = first_epoch, options
        self._keras_train = model.train_function  # traced already, if the model was trained before
        self._keras_test = model.test_function
        self._epoch_iterator: list[Any] = []
        self._to_restore = checkpoint is not None and checkpoint.saved is not None
        self._is_epochs_first = True
        self._any_rows = False
        self._callbacks_watch_batches = False
        self._rate: float | None = None

    # ---- around `fit`

    @contextlib.contextmanager
    def in_place(self, callbacks: list[Any]) -> Iterator[None]:
        """Replace Keras's functions of the model, and restore them with the last weights at the end.

        Args:
            callbacks: the user's.
        """
        base = keras.callbacks.Callback
        self._callbacks_watch_batches = any(
            name in vars(callback) or getattr(type(callback), name) is not getattr(base, name)
            for callback in callbacks
            if not type(callback).__module__.startswith("kerasmem.")
            for name in _HOOKS
        )
        with contextlib.ExitStack() as stack:
            if self.isolated:  # the metrics are in the other process
                stack.enter_context(logs_from_steps(self.model))
            if self.source is not None and self.source.reads_skipped:
                self._epoch_iterator = stack.enter_context(record_epoch_iterator(self.model))
            self.model.train_function = self.train
            try:
                yield
            except BaseException:
                self._rescue()
                raise
            finally:
                self._hand_back()

    def _rescue(self) -> None:
        """After an error or Ctrl-C: bring the model the other process's weights, or those of the last good copy."""
        if self.driver is not None and self.isolated:
            state = self.driver.good
            with contextlib.suppress(RanOut):
                state = self.driver.engine.state()
            if state is not None:
                load_state(self.model, state, WEIGHTS)

    def _hand_back(self) -> None:
        """Give Keras its functions back, traced ones too."""
        engine = None if self.driver is None else self.driver.engine
        if isinstance(engine, LocalEngine):
            self._keras_train, self._keras_test = engine.whole["train"], engine.whole["test"]
        self.model.train_function, self.model.test_function = self._keras_train, self._keras_test
        if engine is not None:
            engine.close()

    # ---- steps

    @stands_in
    def train(self, iterator: Any) -> dict[str, Any]:
        """Stand in for Keras's training function."""
        if self.run.batch < self.run.skipped:
            return self._skip(iterator)
        logs = None
        for batch in self._batches(iterator):
            if self.source is not None and self.source.is_bare:
                batch = batch[0]
            driver = self.driver or self._begin(batch, iterator)
            if self._is_epochs_first:
                self._bring_changes(driver)
            rate = self._new_rate() if self._is_epochs_first or self._callbacks_watch_batches else None
            self._is_epochs_first = False
            logs = driver.step("train", batch, rate)
        return _logs_of_any(logs)

    @stands_in
    def test(self, iterator: Any) -> dict[str, Any]:
        """Stand in for Keras's function that evaluates, within the validation of this `fit`."""
        assert self.driver is not None
        logs = None
        for batch in self._batches(iterator):
            logs = self.driver.step("test", batch)
        return _logs_of_any(logs)

    def _batches(self, iterator: Any) -> Iterator[Any]:
        """Yield the batches of one execution."""
        for _, batch in zip(range(self.model.steps_per_execution), iterator, strict=False):
            yield without_optionals(batch)

    def _skip(self, iterator: Any) -> dict[str, Any]:
        """Count batches that an earlier process has trained on."""
        run, source = self.run, self.source
        count = min(run.skipped - run.batch, self.model.steps_per_execution)
        if source is not None and source.reads_skipped:
            pass_batches(iterator, count)
        return dict(run.logs)

    def _begin(self, batch: Any, iterator: Any) -> Driver:
        """Make all variables and the driver."""
        model, self._any_rows = self.model, has_any_rows(iterator)
        try:
            build_step(model, batch)
        except Exception as error:
            diagnosis = read_exception(error)
            if diagnosis.out_of_memory:  # weights, and what the optimizer keeps
                drop_frames(error)
                raise ModelError(nothing_fits(diagnosis.summary, model, 0)) from None
            if not model.built:
                raise UsageError(
                    f"model: it cannot be built from a batch's shapes ({error}); call it on a batch before fit"
                ) from error
            raise
        if self._to_restore and self.checkpoint is not None:
            load_state(model, self.checkpoint.restored(model))
            self._to_restore = False
        self.driver = Driver(
            self._engine(batch),
            model,
            piece_rows=self._options.piece_rows(self.run, row_count(batch)),
            good=read_state(model) if self.isolated else None,
        )
        if self.checkpoint is not None and self.checkpoint.saved is None:
            self.save()  # so that weights and order are those of this run from its first step
        return self.driver

    def _engine(self, batch: Any) -> Engine:
        """Return the engine."""
        model = self.model
        if self.isolated:
            try:
                return RemoteEngine(model, batch, any_rows=self._any_rows)
            except RanOut as failure:
                raise ModelError(f"the process that is to take the steps does not start: {failure}") from None
            except UsageError as error:
                if not self._options.falls_back:
                    raise
                text = f"steps run in this process, and XLA destroys the weights if one runs out of memory: {error}"
                warn_user(text, RuntimeWarning)
                self.isolated = False
        ours, model.train_function = model.train_function, self._keras_train
        try:
            return LocalEngine(model, any_rows=self._any_rows)
        finally:
            model.train_function = ours

    def _new_rate(self) -> float | None:
        """Return the learning rate if it is a number that has changed."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        variable = getattr(optimizer, "learning_rate", None)
        if not isinstance(variable, keras.Variable):
            return None
        before, self._rate = self._rate, float(keras.ops.convert_to_numpy(variable))
        return self._rate if self._rate != before else None

    def _bring_changes(self, driver: Driver) -> None:
        """Take over weights that callbacks have changed here."""
        if not self.isolated:
            driver.good = None
            return
        here, there = read_state(self.model), driver.keep()
        pairs = [pair for group in WEIGHTS for pair in zip(here[group], there[group], strict=True)]
        if not all(np.array_equal(mine, theirs) for mine, theirs in pairs):
            driver.engine.load({**here, "metrics": there["metrics"]})
            driver.good = None

    # ---- what Keras begins and ends

    def on_train_begin(self, logs: Any = None) -> None:
        """Go to the position of an earlier process."""
        checkpoint, run, at_once = self.checkpoint, self.run, self.model.steps_per_execution
        if checkpoint is None or not self._to_restore:
            return
        source = checkpoint.source
        checkpoint.check(steps=(self.params or {}).get("steps"), at_once=at_once)
        checkpoint.go_to(run)
        over = sum(epoch >= self._first_epoch for epoch in run.epochs)
        source.pass_over(over, next(iter(self._epoch_iterator), None), at_once)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the metrics of the other process, too: Keras has just reset the model's."""
        self._is_epochs_first = True
        if self.driver is not None:
            self.driver.reset_metrics(has_happened=not self.isolated)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Update the model's weights for later callbacks."""
        if self.driver is not None and self.isolated:
            load_state(self.model, self.driver.keep(), WEIGHTS)

    def on_test_begin(self, logs: Any = None) -> None:
        """Take over the steps of this `fit`'s validation."""
        if self.driver is None:
            return
        engine = self.driver.engine
        self._keras_test = engine.whole["test"] if isinstance(engine, LocalEngine) else self.model.test_function
        self.model.test_function = self.test
        self.driver.reset_metrics(has_happened=not self.isolated)

    def on_test_end(self, logs: Any = None) -> None:
        """Restore Keras's own function for other evaluations."""
        self.model.test_function = self._keras_test

    def on_train_end(self, logs: Any = None) -> None:
        """Give the model its saved state if nothing was left to train."""
        checkpoint = self.checkpoint
        if not self._to_restore or checkpoint is None or checkpoint.saved is None:
            return
        if not self.model.built or not self.model.optimizer.built:
            build_step(self.model, checkpoint.source.peek())
        load_state(self.model, checkpoint.restored(self.model, WEIGHTS), WEIGHTS)

    def save(self) -> None:
        """Write the position and the state of the run."""
        if self.checkpoint is not None and self.driver is not None:
            self.run.micro_batch_rows = self.driver.size
            self.checkpoint.write(self.run, self.driver.keep())


def _logs_of_any(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the logs of an execution, or tell Keras that the data has ended, as its own function does."""
    if logs is None:
        raise StopIteration
    return logs


class SaveCallback(SavingCallback):
    """Saves after the user's callbacks."""

    def __init__(self, trainer: Trainer, save_freq: int) -> None:
        super().__init__(trainer.run, trainer.source, save_freq)
        self._trainer = trainer

    def can_save(self) -> bool:
        """Return whether the epoch goes on: its end is saved anyway, after the validation."""
        return self.run.batch != self.run.steps

    def save(self) -> None:
        """Write the position and the state of the run."""
        self._trainer.save()
