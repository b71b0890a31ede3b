"""Which method answers, and what the others say: as Keras would run the step, where nothing else is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.devices.catalogue import DeviceTarget, find_card
from kerasmem.devices.host import host_memory
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.layers import Inferred
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.parallel.asking import SHARDED_METHOD, WHY, one_of_several
from kerasmem.estimation.parallel.parallelism import Parallelism
from kerasmem.estimation.report import Alternative
from kerasmem.estimation.tracing import step_outcome
from kerasmem.models.inputs import ModelInput
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.training import TrainingSettings

# `auto` runs a step for real only where the formula's figure is no more than this share of the memory that is free.
PROBED_SHARE = 0.25


@dataclass(frozen=True)
class Question:
    """The step that is asked about.

    Attributes:
        model, training, structure, inputs, inferred, batch_size, mode: as for `step_outcome`.
        formula_bytes: what the formula says of it.
        source: what `kerasmem.estimate` was given as the model.
        options: and its other arguments that say how to open the model.
        is_fixed: the model's input fixes the batch.
        split: how the step is spread over devices; None for one. `batch_size` is then one device's share.
        whole_batch: the samples of all devices together.
    """

    model: Any
    training: TrainingSettings
    structure: Any
    inputs: list[ModelInput]
    inferred: Inferred
    batch_size: int
    mode: str
    formula_bytes: int
    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    is_fixed: bool = False
    split: Parallelism | None = None
    whole_batch: int = 0

    def ask(self, method: str, target: DeviceTarget | None, jit_compile: bool | str = "auto") -> Outcome:
        """Return what a method that looks at the step finds.

        Raises:
            KerasmemError: it has no answer; the message says why.
        """
        if self.split is None:
            return self._ask_for_one(method, target, jit_compile)
        from kerasmem.models.request import request_for

        return one_of_several(
            method, self.split, self.mode, lambda: self._ask_for_one(method, target, jit_compile),
            request_for(self.source, **self.options, batch_size=self.whole_batch, mode=self.mode, jit_compile=True),
            [row.name for row in self.inferred.layers], self._weights(),
        )  # fmt: skip

    def _ask_for_one(self, method: str, target: DeviceTarget | None, jit_compile: bool | str) -> Outcome:
        if method in ("graph", "xla"):
            return step_outcome(
                method, self.model, self.training, self.structure, self.inputs, self.inferred, self.batch_size,
                self.mode,
            )  # fmt: skip
        from kerasmem.estimation.gpu_target.need import gpu_target_outcome
        from kerasmem.estimation.probe.probing import probe_outcome
        from kerasmem.models.request import request_for

        compiles = True if method == "gpu-target" else jit_compile
        with request_for(
            self.source, **self.options, batch_size=self.batch_size, mode=self.mode, jit_compile=compiles
        ) as request:
            if method == "probe":
                return probe_outcome(request, self.is_fixed)
            if target is None or target.source != "catalogue":
                raise UsageError("method 'gpu-target' plans for a card: name one with --device (device=…)")
            return gpu_target_outcome(
                request, find_card(target.name), [row.name for row in self.inferred.layers], self._weights()
            )

    def _weights(self) -> dict[str, list[tuple[int, str | None]]]:
        """Return each weight's bytes and the row that counts it, in the model's order."""
        groups = {"trainable": self.model.trainable_variables, "non_trainable": self.model.non_trainable_variables}
        return {
            name: [(variable_bytes(each), self.inferred.owners.get(id(each))) for each in group]
            for name, group in groups.items()
        }


@dataclass(frozen=True)
class Choice:
    """The outcome that answers (None: the formula), what other methods say, and why it was chosen."""

    outcome: Outcome | None
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()


def choose(method: str, jit_compile: bool | str, target: DeviceTarget | None, question: Question) -> Choice:
    """Ask the method that was named, or those that match how Keras would run the step, one after another.

    Args:
        method: as for `kerasmem.estimate`, but for "formula".
        jit_compile: True, False or "auto".
        target: the device that was named, or None.
        question: the step.

    Raises:
        KerasmemError: a method was named and cannot answer; "auto" goes on to the next and says why.
    """
    if method != "auto":
        return Choice(question.ask(method, target, jit_compile))
    split = question.split
    if split is not None and split.is_sharded:
        found = question.ask(SHARDED_METHOD, target)
        return Choice(found, (), (f"{SHARDED_METHOD}, since {WHY}",))
    execution, why = _as_keras_would(jit_compile, target, question.model, split)
    notes: list[str] = []
    # A card's own plan is made for one card, and has no exchange between several.
    methods = _methods(execution, target if split is None else None)
    outcome = _first(methods, target, jit_compile, why, question, notes)
    if outcome is None:
        notes.append("the formula answers in their place")
        return Choice(None, (), tuple(notes))
    return Choice(outcome, _other(outcome, target, question), tuple(notes))


def _methods(execution: str, target: DeviceTarget | None) -> tuple[str, ...]:
    """Return the methods for a way of running the step, the truest first."""
    if execution == "graph":
        return ("graph", "probe")
    is_card = target is not None and target.source == "catalogue"
    return ("gpu-target", "xla", "graph") if is_card else ("xla", "graph")


def _first(
    methods: tuple[str, ...], target: DeviceTarget | None, jit_compile: bool | str, why: str, question: Question,
    notes: list[str],
) -> Outcome | None:  # fmt: skip
    for method in methods:
        if method == "probe" and (reason := _too_large(question)):
            notes.append(reason)
            continue
        try:
            outcome = question.ask(method, target, jit_compile)
        except KerasmemError as error:
            notes.append(f"{method} has no answer: {error}")
        except Exception as error:  # the next method is a better answer than a traceback
            notes.append(f"{method} has no answer: unexpected {type(error).__name__}: {error}; a defect in kerasmem")
        else:
            notes.append(f"{method}, since {why}")
            if method == "xla" and "gpu-target" in methods:
                notes.append("XLA's plan for this machine's CPU stands in for the card's: a GPU's is usually smaller")
                outcome = replace(outcome, low=_kept(outcome))
            return outcome
    return None


def _kept(outcome: Outcome) -> int:
    """Return what the step holds from beginning to end, whatever is computed in between."""
    divided = outcome.categories or {}
    return min(outcome.low, sum(divided.get(name, 0) for name in ("weights", "optimizer", "inputs")))


def _too_large(question: Question) -> str | None:
    free = host_memory().available_bytes
    if question.formula_bytes <= PROBED_SHARE * free:
        return None
    return (
        f"no step was run to find out (--method probe): by the formula it needs {question.formula_bytes:,} B, more "
        f"than a quarter of the {free:,} B that are free here"
    )


def _other(outcome: Outcome, target: DeviceTarget | None, question: Question) -> tuple[Alternative, ...]:
    """Return what the other way of running the step would need; only offered where no device is named."""
    other = "xla" if outcome.execution == "graph" else "graph"
    when = "with jit_compile=True" if other == "xla" else "with jit_compile=False"
    if target is None or question.split is not None:
        return (Alternative(other, other, None, None, None, f"ask for it with --method {other}"),)
    try:
        found = question.ask(other, target)
    except Exception as error:  # what is only offered must not stand in the way
        return (Alternative(other, other, None, None, None, str(error)),)
    return (Alternative(other, other, found.total, found.low, found.high, when),)


def _as_keras_would(
    jit_compile: bool | str, target: DeviceTarget | None, model: Any, split: Parallelism | None = None
) -> tuple[str, str]:
    """Return "xla" or "graph", and why."""
    if jit_compile != "auto":
        return ("xla" if jit_compile else "graph"), f"jit_compile={jit_compile}"
    if split is not None:
        return "graph", "Keras does not compile with XLA under tf.distribute"
    if target is None or target.source != "catalogue":
        reason = "no card is named" if target is None else "a size does not say that it is a GPU's"
        return "graph", f"Keras compiles with XLA on a GPU only, and {reason}"
    without = next((layer.name for layer in flatten_layers(model) if not layer.supports_jit), None)
    if without is not None:
        return "graph", f"layer {without!r} cannot be compiled by XLA"
    return "xla", "Keras compiles with XLA on a GPU"
