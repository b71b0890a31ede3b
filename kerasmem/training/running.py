"""What Keras's `fit` calls in place of its own functions for a step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kerasmem.errors import ModelError, UsageError
from kerasmem.training.callbacks import First, Last
from kerasmem.training.saving import Checkpoint
from kerasmem.training.sources import Source, last_of
from kerasmem.training.steps.batches import has_any_rows, row_count, without_optionals
from kerasmem.training.steps.checks import uneven_layers
from kerasmem.training.steps.driver import Driver
from kerasmem.training.steps.engine import Engine, LocalEngine, RanOut
from kerasmem.training.steps.remote import RemoteEngine
from kerasmem.training.steps.state import GROUPS, load_state, read_state

# Callbacks of Keras's that change nothing of a model but its learning rate, before training ends.
_HARMLESS = (
    keras.callbacks.History, keras.callbacks.ProgbarLogger, keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint, keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.TerminateOnNaN,
    keras.callbacks.RemoteMonitor,
)  # fmt: skip
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class Run:
    """One call of `kerasmem.fit`.

    Args:
        model: compiled.
        isolated: whether steps run in a process of their own.
        micro_batches: pieces from the first batch on, or None.
        source: the data, where a checkpoint is written.
        checkpoint: where it is written.
        may_stay: whether what costs the process can be dealt with from within.
    """

    def __init__(
        self,
        model: Any,
        *,
        isolated: bool,
        micro_batches: int | None,
        source: Source | None,
        checkpoint: Checkpoint | None,
        may_stay: bool = True,
    ) -> None:
        self.model, self.isolated, self.source, self.checkpoint = model, isolated, source, checkpoint
        self.driver: Driver | None = None
        self.first, self.last = First(self), Last(self)
        self.size: int | None = None  # rows of a piece, where known from an earlier run
        self.progress: Any = None  # told where training stands, before each step
        self._micro_batches, self._may_stay = micro_batches, may_stay
        self._kept: dict[str, Any] = {}
        self.initial_epoch = 0
        self.skipped = 0  # batches of the epoch in progress that an earlier process has trained on
        self._skip = 0  # of these, how many are still to be counted
        self._walk: Any = None  # how Keras goes through the data, epoch by epoch
        self._logs: dict[str, Any] = {}
        self._pending = False  # what was saved is still to be loaded
        self._fresh = True
        self._any_rows = False
        self._watches = self._risky = False
        self._rate: float | None = None

    # ---- around `fit`

    def install(self, callbacks: list[Any]) -> None:
        """Put our functions in the place of Keras's."""
        model = self.model
        for callback in callbacks:
            if type(callback) not in _HARMLESS and not type(callback).__module__.startswith("kerasmem."):
                self._risky = True
                own, base = type(callback), keras.callbacks.Callback
                self._watches |= any(getattr(own, name) is not getattr(base, name) for name in _BATCH_HOOKS)
        self._kept = {name: getattr(model, name) for name in ("train_function", "test_function")}
        self.kept_epoch = model._initial_epoch
        model.train_function = _Function(self.train)
        if self.isolated:  # the metrics are in the other process; what a step returned is what they say
            model.__dict__["_get_metrics_result_or_logs"] = lambda logs: logs
        if self.source is not None and self.source.reads_skipped:
            model.__dict__["_maybe_symbolic_build"] = self._note_walk

    def uninstall(self) -> None:
        """Give Keras its functions back, traced ones too, and the model what the other process has."""
        model, driver = self.model, self.driver
        for name in ("_get_metrics_result_or_logs", "_maybe_symbolic_build"):
            model.__dict__.pop(name, None)
        model._initial_epoch = self.kept_epoch
        model.train_function, model.test_function = self._kept["train_function"], self._kept["test_function"]
        if driver is None:
            return
        engine = driver.engine
        if isinstance(engine, LocalEngine):
            model.train_function, model.test_function = engine.whole_train, engine.whole_test
        engine.close()

    def rescue(self) -> None:
        """After an error or Ctrl-C: bring the model the other process's weights, or those of the last good copy."""
        if self.driver is not None and self.isolated:
            state = self.driver.last_good
            with contextlib.suppress(RanOut):
                state = self.driver.engine.state()
            if state is not None:
                load_state(self.model, state, ("model", "optimizer"))

    # ---- steps

    def train(self, iterator: Any) -> dict[str, Any]:
        """Stand in for Keras's training function."""
        if self._skip:
            self._pass_over(iterator)
            return dict(self._logs)
        logs = None
        for _ in range(self.model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if logs is None:
                    raise
                break
            if self.driver is None:
                self._any_rows = has_any_rows(iterator)
            logs = self._train(without_optionals(batch))
        assert logs is not None
        return logs

    def _pass_over(self, iterator: Any) -> None:
        """Count batches that an earlier process has trained on."""
        count = min(self._skip, self.model.steps_per_execution)
        self._skip -= count
        source = self.source
        if source is not None and source.reads_skipped:
            source.seen(last_of(iterator, count))
            if not self._skip:
                source.check()

    def _note_walk(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Stand in for what Keras calls with its walk through the data before the first epoch."""
        if self._walk is None:
            self._walk = iterator
        type(self.model)._maybe_symbolic_build(self.model, iterator=iterator, data_batch=data_batch)

    def _train(self, batch: Any) -> dict[str, Any]:
        if self.driver is None:
            self._begin(batch)
        driver = self.driver
        assert driver is not None
        if self._fresh:
            self._catch_up(driver)
        rate = self._new_rate() if self._fresh or self._watches else None
        self._fresh = False
        logs = self._supervised(driver, batch, rate) if self.progress is not None else driver.train(batch, rate)
        if self.source is not None:
            self.source.seen(batch)
        return logs

    def _supervised(self, driver: Driver, batch: Any, rate: float | None) -> dict[str, Any]:
        """Take a step in a process that another one watches, and that cannot survive every failure."""
        self.progress.before(self, driver, row_count(batch))
        try:
            return driver.train(batch, rate)
        except RanOut as failure:
            self.progress.die(failure, "train", row_count(batch), driver.sizes["train"])
            raise

    def test(self, iterator: Any) -> dict[str, Any]:
        """Stand in for Keras's function that evaluates, within the validation of this `fit`."""
        logs = None
        for _ in range(self.model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if logs is None:
                    raise
                break
            assert self.driver is not None
            try:
                logs = self.driver.test(without_optionals(batch))
            except RanOut as failure:
                if self.progress is not None:
                    self.progress.die(failure, "test", row_count(batch), self.driver.sizes["test"])
                raise
        assert logs is not None
        return logs

    def _begin(self, batch: Any) -> None:
        """Make all variables there will be, and what takes the steps."""
        model = self.model
        try:
            model._symbolic_build(data_batch=batch)
        except Exception as error:
            if not model.built:
                raise UsageError(
                    f"model: it cannot be built from a batch's shapes ({error}); call it on a batch before fit"
                ) from error
            raise
        state = None
        if self._pending and self.checkpoint is not None:
            state = self.checkpoint.restored(model)
            load_state(model, state)
            self._pending = False
        uneven = uneven_layers(model)
        good = None
        engine: Engine
        if self.isolated:
            good = read_state(model)
            try:
                engine = RemoteEngine(model, batch, any_rows=self._any_rows)
            except RanOut as failure:
                raise ModelError(f"the process that is to take the steps does not start: {failure}") from None
        else:
            ours = model.train_function
            model.train_function = self._kept["train_function"]  # traced already, where the model was trained before
            engine = LocalEngine(model, any_rows=self._any_rows)
            model.train_function = ours
        self.driver = Driver(
            engine,
            micro_batches=self._micro_batches,
            size=self.size,
            uneven=uneven,
            may_stay=self._may_stay,
            good=good,
            test_size=None if self.progress is None else self.progress.test_size,
        )
        if self.checkpoint is not None and self.checkpoint.point is None:
            self.last.save(
                self.last.epoch, 0, {}
            )  # so that weights and order are those of this run from its first step

    def _new_rate(self) -> float | None:
        """Return the learning rate, where it is a number and not what it was."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        own = getattr(optimizer, "_learning_rate", None)
        if not isinstance(own, keras.Variable):
            return None
        rate, before = float(keras.ops.convert_to_numpy(own)), self._rate
        self._rate = rate
        return rate if rate != before else None

    def _catch_up(self, driver: Driver) -> None:
        """An epoch begins: see what callbacks may have changed between the epochs."""
        if not self._risky:
            return
        if not self.isolated:
            driver.forget()
            return
        here, there = read_state(self.model), driver.keep()
        if any(
            not np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f")
            for group in GROUPS[:2]
            for mine, theirs in zip(here[group], there[group], strict=True)
        ):
            driver.engine.load({**here, "metrics": there["metrics"]})
            driver.forget()

    # ---- between steps

    def begin(self, params: Mapping[str, Any]) -> None:
        """`fit` begins: see whether to go on with an earlier run."""
        checkpoint, source = self.checkpoint, self.source
        if checkpoint is None or checkpoint.point is None or source is None:
            return
        checkpoint.check(steps=params.get("steps"), at_once=self.model.steps_per_execution)
        point = checkpoint.point
        self.size = self.size or checkpoint.more.get("size")
        source.go_to(point.sequence["at"], point.epoch, point.batch)
        source.pass_over(point.epoch - self.initial_epoch, self._walk, self.model.steps_per_execution)
        if not point.batch:
            source.check()
        self._skip = self.skipped = point.batch
        self._logs = dict(point.logs)
        self._pending = True

    def begin_epoch(self, epoch: int) -> None:
        """Keras has just begun its metrics anew."""
        self._fresh = True
        if self.source is not None:
            self.source.begin_epoch(epoch)
        if self.driver is not None:
            self.driver.reset_metrics(has_happened=not self.isolated)

    def end_epoch(self) -> None:
        """Bring the model what callbacks expect it to have."""
        self.skipped = 0
        if self.driver is not None and self.isolated:
            load_state(self.model, self.driver.keep(), ("model", "optimizer"))

    def begin_test(self) -> None:
        """The validation of this `fit` begins; Keras begins its metrics anew."""
        if self.driver is None:
            return
        engine = self.driver.engine
        self._kept["test_function"] = engine.whole_test if isinstance(engine, LocalEngine) else self.model.test_function
        self.model.test_function = _Function(self.test)
        self.driver.reset_metrics(has_happened=not self.isolated)

    def end_test(self) -> None:
        """It is over; what else evaluates uses Keras's own function."""
        self.model.test_function = self._kept["test_function"]

    def finish(self) -> None:
        """`fit` ends; where nothing was left to train, the model gets what was saved."""
        if self._pending and self.checkpoint is not None:
            load_saved(self.model, self.checkpoint)


def load_saved(model: Any, checkpoint: Checkpoint) -> None:
    """Load weights and optimizer of a run that has nothing left to train."""
    if not model.built or not model.optimizer.built:
        model._symbolic_build(data_batch=checkpoint.source.peek())
    groups = ("model", "optimizer")
    load_state(model, checkpoint.restored(model, groups=groups), groups)


class _Function:
    """Called by Keras; known as ours."""

    is_kerasmem = True

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, iterator: Any) -> Any:
        return self._function(iterator)
