"""Searches that survive: a trial of Optuna or KerasTuner that has no room fails alone, and each gives its memory back.

A trial runs out in one of three ways: the estimate says before it trains that it cannot fit (`require_fit`), TensorFlow
says so while it trains, or a process of its own that it ran in (`run_isolated`) says so. For all of them the trial is
pruned (Optuna) or FAILED (KerasTuner) with the reason, and the search goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerasmem.devices.catalogue import resolve_device
from kerasmem.devices.room import allocator_limit, room_for_training
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.diagnosis.explaining import read_exception
from kerasmem.errors import DoesNotFitError, KerasmemError, MissingExtraError, UsageError
from kerasmem.estimation.facade import DEFAULT_BATCH_SIZE, estimate
from kerasmem.estimation.report import MemoryReport
from kerasmem.estimation.verdict import DOES_NOT_FIT
from kerasmem.models.freeing import clear_session, drop_frames
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.training import optimizer_slot_bytes, training_of_model
from kerasmem.training.isolation import DONE, IsolatedRun
from kerasmem.units import format_size

_EXTRA = "searches"
_NEVER = -1  # no number of trials in a row


def require_fit(
    model: Any, *, batch_size: int = DEFAULT_BATCH_SIZE, device: str | int | None = None, **options: Any
) -> MemoryReport:
    """Return the estimate of a model that is about to train, and refuse one that cannot fit.

    Args:
        model: as for `kerasmem.estimate`.
        batch_size: samples in a batch.
        device: a card ("t4") or a size ("16GB", or bytes); None: what TensorFlow may take here.
        **options: the other arguments of `kerasmem.estimate`.

    Returns:
        The report. A verdict "too close to call" is no refusal.

    Raises:
        DoesNotFitError: even the least that the step takes is more than there is.
        KerasmemError: as `kerasmem.estimate`.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100_000)])
        >>> model.compile("adam", "mse")
        >>> kerasmem.require_fit(model, device="8MB")
        Traceback (most recent call last):
        ...
        kerasmem.errors.DoesNotFitError: model ...: its weights and its optimizer alone take 10.3 MiB, and there are ...
    """
    room = _room(model) if device is None else resolve_device(str(device)).available_bytes
    held = _held(model) if options.get("mode", "train") == "train" else 0
    if held > room:  # no step need be traced for it
        raise DoesNotFitError(
            f"model {model.name!r}: its weights and its optimizer alone take {format_size(held)}, and there are "
            f"{format_size(room)}"
        )
    if getattr(model, "jit_compile", None) is False:
        # Asked for "auto", XLA would be, too: each compilation leaves memory behind, and may end a process whose CPU
        # allocator has a limit.
        options.setdefault("method", "graph")
    report = estimate(model, batch_size=batch_size, device=room if device is None else device, **options)
    found = report.device
    if found is not None and found.verdict == DOES_NOT_FIT:
        raise DoesNotFitError(
            f"model {report.model.name!r} at batch {batch_size:,} takes {format_size(report.bytes.total)} by the "
            f"estimate ({report.settings.method}), and there are {format_size(found.available_bytes)}"
        )
    return report


def optuna_objective(objective: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an Optuna objective: a trial without room is pruned, and each gives its memory back.

    The trial's user attribute "kerasmem" has the reason and, where memory ran out, the diagnosis. The objective may
    return an `IsolatedRun`: its value counts, and a process that ran out, died or took too long prunes the trial.
    Other exceptions go on to Optuna. After each trial Keras's state is cleared, but for the dtype policy.

    Args:
        objective: takes a trial, and returns the value or values.

    Raises:
        MissingExtraError: Optuna is not installed.

    Examples:
        >>> import keras, kerasmem, numpy as np, optuna
        >>> optuna.logging.set_verbosity(optuna.logging.ERROR)
        >>> @kerasmem.optuna_objective
        ... def objective(trial):
        ...     dense = keras.layers.Dense
        ...     model = keras.Sequential([keras.Input((8,)), dense(trial.suggest_int("units", 4, 64)), dense(1)])
        ...     model.compile("adam", "mse")
        ...     kerasmem.require_fit(model, batch_size=32)
        ...     return model.fit(np.ones((64, 8)), np.ones((64, 1)), verbose=0).history["loss"][-1]
        >>> study = optuna.create_study()
        >>> study.optimize(objective, n_trials=3)
        >>> [trial.state.name for trial in study.trials]
        ['COMPLETE', 'COMPLETE', 'COMPLETE']
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise MissingExtraError("optuna_objective", _EXTRA) from None

    @functools.wraps(objective)
    def surviving(trial: Any, *arguments: Any, **named: Any) -> Any:
        try:
            outcome = _outcome(lambda: objective(trial, *arguments, **named))
        finally:
            give_back()
        if isinstance(outcome, _NoRoom):
            diagnosis = None if outcome.diagnosis is None else outcome.diagnosis.to_dict()
            trial.set_user_attr("kerasmem", {"reason": outcome.reason, "diagnosis": diagnosis})
            raise optuna.TrialPruned(outcome.reason)
        return outcome

    return surviving


def tuner_class(base: type) -> Any:
    """Return a KerasTuner class whose search survives: a trial without room is FAILED, and each gives its memory back.

    Before a model trains it is estimated, with the `batch_size` that `search` was given or that the data set has. The
    trial's `message` has the reason. However many such trials follow one another, the search goes on. `run_trial` of a
    class of one's own may return an `IsolatedRun`.

    Args:
        base: `keras_tuner.RandomSearch`, `keras_tuner.Hyperband` or another of its tuners.

    Returns:
        A class with the same arguments and one more, `device`: what the models have to fit, as for `require_fit`.

    Raises:
        UsageError: it is no class of KerasTuner's.
        MissingExtraError: KerasTuner is not installed.

    Examples:
        >>> import keras, kerasmem, keras_tuner, numpy as np, tempfile
        >>> def build(hp):
        ...     dense = keras.layers.Dense
        ...     model = keras.Sequential([keras.Input((8,)), dense(hp.Int("units", 4, 64)), dense(1)])
        ...     model.compile("adam", "mse")
        ...     return model
        >>> search = kerasmem.tuner_class(keras_tuner.RandomSearch)
        >>> tuner = search(build, objective="loss", max_trials=2, directory=tempfile.mkdtemp(), device="1GB")
        >>> tuner.search(np.ones((64, 8)), np.ones((64, 1)), verbose=0)
        >>> [trial.status for trial in tuner.oracle.trials.values()]
        ['COMPLETED', 'COMPLETED']
    """
    try:
        import keras_tuner
    except ModuleNotFoundError:
        raise MissingExtraError("tuner_class", _EXTRA) from None
    if not (isinstance(base, type) and issubclass(base, keras_tuner.Tuner)):
        raise UsageError(f"tuner_class: give a class of KerasTuner's, such as keras_tuner.RandomSearch, not {base!r}")

    class Surviving(base):
        """The tuner, whose trials without room are FAILED."""

        def __init__(self, *args: Any, device: str | int | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            inner = getattr(self, "hypermodel", None)
            self.hypermodel = None if inner is None else _estimated(inner, device)
            if "max_consecutive_failed_trials" not in kwargs:
                self.oracle.max_consecutive_failed_trials = _NEVER

        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
            outcome = _outcome(lambda: super(Surviving, self).run_trial(trial, *args, **kwargs))
            if isinstance(outcome, _NoRoom):
                raise keras_tuner.errors.FailedTrialError(outcome.reason)
            return outcome

        def on_trial_end(self, trial: Any) -> None:
            super().on_trial_end(trial)
            give_back()  # not before: the history that a trial returns holds its model

    Surviving.__name__ = Surviving.__qualname__ = f"Surviving{base.__name__}"
    return Surviving


def _estimated(inner: Any, device: str | int | None) -> Any:
    """Return a hypermodel that stands before the user's and refuses what cannot fit."""
    import keras_tuner

    class Estimated(keras_tuner.HyperModel):
        def build(self, hp: Any) -> Any:
            return inner.build(hp)

        def declare_hyperparameters(self, hp: Any) -> None:
            inner.declare_hyperparameters(hp)

        def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_before_fit(model, args, kwargs, device)
            return inner.fit(hp, model, *args, **kwargs)

    return Estimated(name=inner.name, tunable=inner.tunable)


def give_back() -> None:
    """Free the models that are gone and clear Keras's state, but for the dtype policy, which is the program's."""
    import keras

    policy = keras.config.dtype_policy()
    clear_session()
    keras.config.set_dtype_policy(policy)


@dataclass(frozen=True)
class _NoRoom:
    reason: str
    diagnosis: Diagnosis | None = None


def _outcome(run: Callable[[], Any]) -> Any:
    """Return what a trial returns, or a `_NoRoom`; raise what has nothing to do with memory."""
    try:
        result = run()
    except DoesNotFitError as error:
        return _NoRoom(str(error))
    except Exception as error:
        diagnosis = read_exception(error)
        if not diagnosis.out_of_memory:
            raise
        drop_frames(error)  # they hold the model
        return _NoRoom(diagnosis.summary, diagnosis)
    if not isinstance(result, IsolatedRun):
        return result
    return result.value if result.status == DONE else _NoRoom(result.reason or result.status, result.diagnosis)


def _refuse_before_fit(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any) -> None:
    """Refuse a model that cannot fit; let one train whose batch is not known, or that cannot be estimated."""
    batch_size = kwargs.get("batch_size") or _rows(args[0] if args else kwargs.get("x"))
    if batch_size is None:
        return
    try:
        require_fit(model, batch_size=batch_size, device=device)
    except DoesNotFitError:
        raise
    except UsageError:
        if device is not None:
            raise
    except KerasmemError:
        return


def _rows(x: Any) -> int | None:
    """Return the rows of a batch: of arrays Keras's default, of a data set its own; None where it does not tell."""
    import keras

    if not hasattr(x, "element_spec") and not isinstance(x, keras.utils.PyDataset):
        return DEFAULT_BATCH_SIZE if hasattr(x, "shape") or isinstance(x, (dict, list, tuple)) else None
    leaves = keras.tree.flatten(x.element_spec if hasattr(x, "element_spec") else x[0])
    shape = getattr(next(iter(leaves), None), "shape", None)
    return next(iter(shape), None) if shape is not None and getattr(shape, "rank", 1) is not None else None


def _held(model: Any) -> int:
    """Return the bytes of a model's weights and of its optimizer's slots; 0 where they are not known yet."""
    if not getattr(model, "built", False) or not hasattr(model, "variables"):
        return 0
    slots = optimizer_slot_bytes(training_of_model(model), model.trainable_variables)
    return sum(variable_bytes(each) for each in model.variables) + (slots or 0)


def _room(model: Any) -> int:
    """Return the bytes that TensorFlow may take here, whatever holds them now: what is refused would not fit alone."""
    limit = allocator_limit()
    if limit is not None:
        return limit
    parts = [*getattr(model, "variables", ()), *(getattr(getattr(model, "optimizer", None), "variables", None) or ())]
    own = sum({id(each): variable_bytes(each) for each in parts}.values())  # it is no longer free, and in the estimate
    return room_for_training() + own
