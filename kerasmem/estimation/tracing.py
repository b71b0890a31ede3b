"""The first two steps of an estimate: the model is opened, then called once on shapes alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kerasmem.compat.keras_functional import is_functional
from kerasmem.errors import ModelError, UsageError
from kerasmem.estimation.arguments import DEFAULT_BATCH_SIZE, EstimateArguments
from kerasmem.estimation.formula import formula, share_out
from kerasmem.estimation.layers import Inferred, infer_layers
from kerasmem.estimation.report import Formula, LayerMemory
from kerasmem.models.backend import TENSORFLOW, import_keras, keras_backend
from kerasmem.models.freezing import NotRebuiltError
from kerasmem.models.inputs import ModelInput, given_targets, model_inputs, normalise_input_shapes
from kerasmem.models.opening import OBJECT_SOURCE, OpenedModel, open_model
from kerasmem.models.own_step import has_call, has_own_step, keeps_optimizers, optimizer_variables, optimizers_of
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.step import PreparedStep, TracedStep, check_mode, prepare_step, trace_step
from kerasmem.models.training import TrainingSettings, optimizer_slot_bytes, with_replaced
from kerasmem.processes.guarding import note_stage

LARGEST_TRACED_BATCH = 1024


@dataclass(frozen=True)
class OpenedStep(OpenedModel):
    """A model that was opened, and how it is trained: as the arguments say in place of the model's own settings.

    Attributes:
        only_formula: why no method can look at its step; None where they can.
        prepared: the step that was prepared last, for another batch size to begin from.
        inferred: by batch size, what a call of the model on shapes showed.
    """

    only_formula: str | None = None
    prepared: list[PreparedStep] = field(default_factory=list, compare=False)
    inferred: dict[int, Inferred] = field(default_factory=dict, compare=False)

    @property
    def serves_again(self) -> bool:
        """Whether a further estimate of the model finds it as the first one did: it is a graph of layers, and built."""
        model = self.model
        is_graph = is_functional(model) or (isinstance(model, import_keras().Sequential) and model.built)
        return is_graph and not has_own_step(model)


@dataclass(frozen=True)
class TracedShapes:
    """What a call of the model on shapes shows.

    Attributes:
        structure: how the model takes its inputs.
        inputs: those, without open dimensions but the batch.
        is_fixed: the model's input fixes the batch.
        batch_size: samples; of several devices one device's share.
        inferred: the rows of the report, and which of them counts which weight.
        layers: the rows, with their bytes by the formula.
        formula: the formula's figures.
        slots: the optimizer's slots in bytes; None where there are none or they are not known.
        optimizers: the classes of those that the step itself applies, in lower case; empty where Keras's step does.
        notes: on the batch.
    """

    structure: Any
    inputs: list[ModelInput]
    is_fixed: bool
    batch_size: int
    inferred: Inferred
    layers: tuple[LayerMemory, ...]
    formula: Formula
    slots: int | None
    optimizers: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """The estimated training step: arguments, opened model, and shapes."""

    arguments: EstimateArguments
    opened: OpenedStep
    shapes: TracedShapes

    @property
    def optimizer(self) -> str | None:
        """The name of the optimizer, or of several if the step applies them; None if unknown."""
        return ", ".join(self.shapes.optimizers) or self.opened.training.optimizer

    @property
    def rows(self) -> list[str]:
        """The names of the layers in the report."""
        return [row.name for row in self.shapes.layers]

    def weights(self) -> dict[str, list[tuple[int, str | None]]]:
        """Return each weight's bytes and the row that counts it, by group, in the model's order."""
        model, owners = self.opened.model, self.shapes.inferred.owners
        groups = {"trainable": model.trainable_variables, "non_trainable": model.non_trainable_variables}
        return {
            name: [(variable_bytes(each), owners.get(id(each))) for each in group] for name, group in groups.items()
        }


@contextlib.contextmanager
def open_step(arguments: EstimateArguments) -> Iterator[OpenedStep]:
    """Open the model for as long as the context lasts: without weights, unless the formula alone is asked.

    Raises:
        ModelFileError: the file cannot be opened.
        NotRebuiltError: a method was named that needs a copy of a live model, which cannot be made.
    """
    source = arguments.model or arguments.factory
    note_stage(f"opening {source if isinstance(source, (str, os.PathLike)) else 'the model'}")
    looks_at_step, reason = arguments.method != "formula", None
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(open_model(arguments.model, **arguments.opening(), shapes_only=looks_at_step))
        except NotRebuiltError as error:
            if arguments.method != "auto" or arguments.dtype_policy is not None:
                raise
            reason = str(error)
            found = stack.enter_context(open_model(arguments.model, **arguments.opening()))
        targets = given_targets(arguments.target_shape, arguments.target_dtype)
        training = with_replaced(found.training, arguments.optimizer, arguments.loss, targets)
        yield OpenedStep(**{**vars(found), "training": training}, only_formula=reason)


def trace_shapes(arguments: EstimateArguments, opened: OpenedStep) -> TracedShapes:
    """Call the model on shapes and return its layers and inputs.

    Raises:
        UsageError: the shapes or the batch contradict the model's.
        ModelError: the model cannot be called on them.
    """
    note_stage("calling the model on shapes")
    asked, mode, replicas = arguments.batch_size, arguments.mode, arguments.replicas
    structure, inputs = _inputs(opened, arguments.input_shape)
    share = -(-asked // replicas)
    fixed = [each.shape[0] for each in inputs if each.shape[0] is not None]
    batch = _settled_batch(share, fixed)
    whole = asked if batch == share else batch * asked // share
    notes = [] if batch == share else [f"the model's input fixes the batch at {batch}"]
    if replicas > 1:
        uneven = ", the largest share" if whole % replicas else ""
        notes.append(f"one of {replicas} replicas: {batch:,} of the {whole:,} samples of a batch{uneven}")
    # A sample's figures do not depend on the batch, and TensorFlow counts elements in 31 bits.
    traced = batch if fixed else min(batch, LARGEST_TRACED_BATCH)
    source = "" if opened.source == OBJECT_SOURCE else opened.source
    run_step = _step_that_calls(opened, mode, structure, inputs, traced)
    try:
        inferred = opened.inferred.get(traced)
        if inferred is None:
            inferred = infer_layers(opened.model, structure, inputs, traced, source, run_step)
    except ModelError:
        if run_step is not None or mode != "train" or not has_own_step(opened.model) or keras_backend() != TENSORFLOW:
            raise
        run_step = partial(_trace, opened, mode, structure, inputs, traced)  # which takes something else than `call`
        inferred = infer_layers(opened.model, structure, inputs, traced, source, run_step)
    opened.inferred[traced] = inferred
    slots, applied = None, []
    if mode == "train" and run_step is None:
        assumed = opened.training if opened.training.optimizer else TrainingSettings("adam")
        slots = optimizer_slot_bytes(assumed, list(opened.model.trainable_variables))
    elif mode == "train":
        slots = sum(map(variable_bytes, optimizer_variables(opened.model)))
        applied = [type(each).__name__.lower() for each in optimizers_of(opened.model) if each.built]
    layers = share_out(inferred.layers, batch, mode)
    return TracedShapes(
        structure, inputs, bool(fixed), batch, inferred, layers, formula(layers, batch, mode), slots,
        tuple(applied), tuple(notes),
    )  # fmt: skip


def _step_that_calls(
    opened: OpenedStep, mode: str, structure: Any, inputs: list[ModelInput], batch_size: int
) -> Callable[[], Any] | None:
    """Return a function that traces the step, if the model's `train_step` calls the layers itself; else None.

    On JAX it is always `call` that is looked at.
    """
    model = opened.model
    by_itself = mode == "train" and has_own_step(model) and keeps_optimizers(model)
    if keras_backend() != TENSORFLOW or (has_call(model) and not by_itself):
        return None
    check_mode(model, mode)
    return partial(_trace, opened, mode, structure, inputs, batch_size)


def _trace(opened: OpenedStep, mode: str, structure: Any, inputs: list[ModelInput], batch_size: int) -> TracedStep:
    return trace_step(prepare_step(opened.model, opened.training, structure, inputs, batch_size, mode))


def _inputs(opened: OpenedStep, input_shape: Any) -> tuple[Any, list[ModelInput]]:
    try:
        return model_inputs(opened.model, normalise_input_shapes(input_shape))
    except UsageError as error:
        if opened.source == OBJECT_SOURCE:
            raise
        raise UsageError(f"{opened.source}: {error}") from error


def _settled_batch(asked: int, fixed: list[int]) -> int:
    """Return the batch size that the model's inputs fix, or else the requested one."""
    sizes = sorted(set(fixed))
    if len(sizes) > 1:
        raise UsageError(f"the model's inputs fix different batch sizes: {sizes}")
    if not sizes or sizes[0] == asked:
        return asked
    if asked != DEFAULT_BATCH_SIZE:
        raise UsageError(f"batch_size {asked}: the model's input fixes the batch at {sizes[0]}")
    return sizes[0]
