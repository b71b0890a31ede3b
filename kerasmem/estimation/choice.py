"""Which method answers, and what the others say: as Keras would run the step, where nothing else is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.layers import Inferred
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.report import Alternative
from kerasmem.estimation.tracing import step_outcome
from kerasmem.models.inputs import ModelInput
from kerasmem.models.training import TrainingSettings


@dataclass(frozen=True)
class Question:
    """The step that is asked about; see `step_outcome` for the fields."""

    model: Any
    training: TrainingSettings
    structure: Any
    inputs: list[ModelInput]
    inferred: Inferred
    batch_size: int
    mode: str

    def ask(self, method: str) -> Outcome:
        """Return what a method that looks at the step finds."""
        return step_outcome(
            method, self.model, self.training, self.structure, self.inputs, self.inferred, self.batch_size, self.mode
        )


@dataclass(frozen=True)
class Choice:
    """The outcome that answers (None: the formula), what other methods say, and why it was chosen."""

    outcome: Outcome | None
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()


def choose(method: str, jit_compile: bool | str, target: DeviceTarget | None, question: Question) -> Choice:
    """Ask the method that was named, or the one that matches how Keras would run the step.

    Args:
        method: as for `kerasmem.estimate`, but for "formula".
        jit_compile: True, False or "auto".
        target: the device that was named, or None.
        question: the step.

    Raises:
        KerasmemError: a method was named and cannot answer; "auto" goes on to the next and says why.
    """
    if method != "auto":
        return Choice(question.ask(method))
    first, why = _as_keras_would(jit_compile, target, question.model)
    second = "graph" if first == "xla" else "xla"
    notes, alternatives = [], []
    outcome = None
    try:
        outcome = question.ask(first)
        notes.append(f"{first}, since {why}")
    except UsageError:
        raise
    except KerasmemError as error:
        notes.append(f"{first} would match ({why}), but: {error}")
    if target is not None or (outcome is None and second == "graph"):
        try:
            other = question.ask(second)
            if outcome is None:
                outcome = other
            else:
                alternatives.append(
                    Alternative(other.method, other.execution, other.total, other.low, other.high, _when(second))
                )
        except UsageError:
            raise
        except KerasmemError as error:
            alternatives.append(Alternative(second, second, None, None, None, str(error)))
    elif outcome is not None:
        alternatives.append(Alternative(second, second, None, None, None, f"ask for it with --method {second}"))
    if outcome is None:
        notes.append("the formula answers in their place")
    return Choice(outcome, tuple(alternatives), tuple(notes))


def _when(method: str) -> str:
    return "with jit_compile=False" if method == "graph" else "with jit_compile=True"


def _as_keras_would(jit_compile: bool | str, target: DeviceTarget | None, model: Any) -> tuple[str, str]:
    """Return "xla" or "graph", and why."""
    if jit_compile != "auto":
        return ("xla" if jit_compile else "graph"), f"jit_compile={jit_compile}"
    if target is None or target.source != "catalogue":
        reason = "no card is named" if target is None else "a size does not say that it is a GPU's"
        return "graph", f"Keras compiles with XLA on a GPU only, and {reason}"
    if not all(layer.supports_jit for layer in model._flatten_layers()):
        without = next(layer.name for layer in model._flatten_layers() if not layer.supports_jit)
        return "graph", f"layer {without!r} cannot be compiled by XLA"
    return "xla", "Keras compiles with XLA on a GPU"
