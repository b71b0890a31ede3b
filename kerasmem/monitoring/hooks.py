"""Which of Keras's hooks means what: beginnings and ends of runs, epochs and batches for the recorder."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from kerasmem.cluster import find_worker
from kerasmem.compat.keras_calls import stop_watching_saving, watch_saving
from kerasmem.monitoring.calls import KerasCall
from kerasmem.monitoring.inputs import float64_inputs
from kerasmem.monitoring.recorder import Kind, Recorder
from kerasmem.monitoring.step_profiler import BatchProfile

_METHODS: dict[Kind, str] = {"train": "fit", "test": "evaluate", "predict": "predict"}


class LoggerHooks:
    """The hooks of `MemoryLogger`; stands before `keras.callbacks.Callback` among its bases."""

    model: Any
    params: Any
    _model: Any
    _recorder: Recorder
    _profile: BatchProfile | None

    def _forget_runs(self) -> None:
        """Be as before the first run."""
        self._kind: Kind = "train"  # of the run under way
        self._test_phase = "evaluate"
        self._taken_up: int | None = None  # the thread in which a Keras method has that has not begun yet
        self._call: KerasCall | None = None  # that began the run under way; None if that was begun by hand
        self._guests: dict[int, KerasCall] = {}  # calls that are not logged, by thread
        self._run_model: weakref.ref[Any] | None = None
        self._run_params: Any = None
        self._totals: dict[Kind, int | None] = {}  # batches an epoch, where Keras knows
        self._line: str | None = None  # waits until the progress bar has ended its own

    def _try_growth(self) -> None:
        raise NotImplementedError

    # ---------------------------------------------------------- Keras's hooks

    def set_model(self, model: Any) -> None:
        """Note that a Keras method has taken the callback up (validation inside `fit` does not)."""
        if not self._is_guests():
            super().set_model(model)  # type: ignore[misc]
            self._taken_up = threading.get_ident()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a run: try memory growth if that was not done, open the file and the devices."""
        if not self._is_guests() and self._admit("train"):
            self._begin_run("train")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the run."""
        if not self._is_guests():
            self._end_run()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin an epoch's maxima."""
        if self._is_guests():
            return
        self._print_line()
        if self._recorder.run is None and not self._recorder.broken:
            self._begin_run("train")
        self._recorder.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the epoch's maxima, and put them into `logs`."""
        if self._is_guests():
            return
        ended = self._recorder.end_epoch()
        if ended is None:
            return
        values, line = ended
        if logs is not None and self._recorder.settings.epoch_logs:
            logs.update(values)
        worker = self._recorder.worker
        self._line = line if self._recorder.settings.verbose and (worker is None or worker.rank == 0) else None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        if self._profile is not None and not self._is_guests():
            self._profile.on_train_batch_begin(batch)  # first, for what it takes is not the batch's
        self._begin_batch("train", batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        self._end_batch("train", "train", batch)
        if self._profile is not None and not self._is_guests():
            self._profile.on_train_batch_end(batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin validation inside `fit`, or a run of `evaluate`."""
        if self._is_guests():
            return
        taken_up = self._is_taken_up()
        part = self._begin_part("test")
        if part is None:
            return
        validation = part and not taken_up
        self._test_phase = "validation" if validation else "evaluate"
        self._recorder.phase.enter(self._test_phase)
        if validation and self._call is not None and self._run_model is not None:
            iterator = getattr(self._run_model(), "_eval_epoch_iterator", None)
            self._totals["test"] = getattr(iterator, "num_batches", None)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """End validation, or the run of `evaluate`."""
        self._end_part("test")

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        self._begin_batch("test", batch)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        self._end_batch("test", self._test_phase, batch)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a run of `predict`, or a part of the run under way."""
        if not self._is_guests() and self._begin_part("predict") is not None:
            self._recorder.phase.enter("predict")

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the run of `predict`."""
        self._end_part("predict")

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the peak since the batch before, and start this batch's own."""
        self._begin_batch("predict", batch)

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the batch."""
        self._end_batch("predict", "predict", batch)

    # ------------------------------------------------------------------ runs

    def _begin_run(self, kind: Kind) -> None:
        self._try_growth()
        call = KerasCall.innermost(_METHODS[kind])
        worker = find_worker(getattr(self._model, "distribute_strategy", None))
        self._recorder.begin_run(None if call is None else call.is_running, worker)
        self._kind = kind
        self._call = call
        # Hooks called by hand leave `params` as the last Keras method had them.
        self._totals = {kind: None if call is None else (self.params or {}).get("steps")}
        if call is not None:
            import keras

            for wide in float64_inputs(call.arguments(), keras.config.floatx()):
                self._recorder.note(wide)
        self._watch_saving(False)  # in a run that broke off
        self._run_model = None if self._model is None else weakref.ref(self._model)
        self._watch_saving(True)
        self._run_params = self.params
        self._taken_up = None
        if self._profile is not None and kind == "train":
            self._profile.begin_run(self._model, worker)

    def _end_run(self) -> None:
        self._print_line()
        self._watch_saving(False)
        if self._profile is not None:
            self._profile.end_run()
        self._recorder.end_run()

    def _watch_saving(self, on: bool) -> None:
        model = None if self._run_model is None else self._run_model()
        if model is not None:
            (watch_saving if on else stop_watching_saving)(model, self._recorder.phase)

    def _begin_batch(self, kind: Kind, batch: int) -> None:
        if self._is_guests():
            return
        if self._recorder.run is None and not self._recorder.broken:  # a custom loop that skips on_…_begin
            self._begin_run(kind)
        self._recorder.begin_batch(kind, batch)

    def _end_batch(self, kind: Kind, phase: str, batch: int) -> None:
        if not self._is_guests():
            self._recorder.end_batch(kind, phase, batch, self._totals.get(kind))

    def _begin_part(self, kind: Kind) -> bool | None:
        """Begin a run, or a part of the one under way; return whether it is a part, None for neither."""
        if not self._admit(kind):
            return None
        taken_up = self._is_taken_up()
        part = self._recorder.run is not None and (not taken_up or self._call is None or self._call.is_running())
        if part:
            self._totals[kind] = (self.params or {}).get("steps") if taken_up else None
            self._taken_up = None
        else:
            self._begin_run(kind)
        self._recorder.begin_part(kind)
        return part

    def _end_part(self, kind: Kind) -> None:
        if self._is_guests():
            return
        self._recorder.begin_part(kind)
        self._recorder.phase.enter("between")
        if self._kind == kind:
            self._end_run()

    # ---------------------------------------------------- other calls meanwhile

    def _is_taken_up(self) -> bool:
        return self._taken_up == threading.get_ident()

    def _is_guests(self) -> bool:
        """Whether the hook comes from a call that is not logged."""
        if not self._guests:
            return False
        thread = threading.get_ident()
        guest = self._guests.get(thread)
        if guest is None:
            return False
        if guest.is_running():
            return True
        del self._guests[thread]  # it may have raised; nothing else would tell
        return False

    def _admit(self, kind: Kind) -> bool:
        """Return whether the call that begins now is to be logged; what cannot be becomes a guest.

        One logger follows one run, so a `fit` inside another and any call in another thread have to wait until
        the one under way has ended. (`evaluate` and `predict` inside `fit` are parts of it.)
        """
        under_way = self._call
        if self._recorder.run is None or under_way is None:
            return True
        call = KerasCall.innermost(_METHODS[kind])
        here = under_way.thread == threading.get_ident()
        if call is None or (here and kind != "train") or not under_way.is_running():
            return True
        if call == under_way:  # the logger is in the list twice
            return False
        self._guests[threading.get_ident()] = call
        self._taken_up = None
        self._model, self.params = self._run_model() if self._run_model is not None else None, self._run_params
        where = "inside the run under way" if here else "in another thread while a run was under way"
        self._recorder.note(
            f"run: {_METHODS[kind]} was called {where} and is not logged; give it a MemoryLogger of its own", say=True
        )
        return False

    def _print_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            print(line, flush=True)
