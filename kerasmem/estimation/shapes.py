"""The training step of a model, with shapes from a symbolic call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.errors import ModelError, UsageError
from kerasmem.estimation.formula import FLOAT32_BYTES, MEASURED_LOSS, MEASURED_UPDATE, formula, share_out
from kerasmem.estimation.layers import Inferred, infer_layers, is_opaque, not_callable
from kerasmem.estimation.report import Formula, LayerMemory
from kerasmem.models.backend import import_keras, runs_on_jax
from kerasmem.models.compiling import TrainingSettings, compile_model, loss_name, optimizer_name
from kerasmem.models.inputs import ModelInput
from kerasmem.models.opening import OBJECT_SOURCE, OpenedModel
from kerasmem.models.own_step import has_call, has_own_step, keeps_optimizers, optimizer_variables, optimizers_of
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import PreparedStep, output_spec, prepare_step, trace_step
from kerasmem.models.user_code import compiled_parts

LARGEST_TRACED_BATCH = 1024


@dataclass
class StepCache:
    """Results that estimates of one opened model share. Not thread-safe.

    Attributes:
        inferred: by batch size, the rows of the layers and whether the step was traced for them.
        prepared: the last prepared step.
        assumptions: assumptions about optimizer and loss, or None if the model is not compiled yet.
    """

    inferred: dict[int, tuple[Inferred, bool]] = field(default_factory=dict)
    prepared: PreparedStep | None = None
    assumptions: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ShapedStep:
    """The training step that a method estimates.

    Attributes:
        spec: the settings.
        target: the named device, or None.
        opened: the model, compiled.
        training: the user's replacements of arguments of `compile`.
        cache: results of earlier estimates of this model.
        structure: nesting of the model's inputs.
        inputs: the inputs, with the batch as the only open dimension.
        batch_size: samples; with several replicas, the share of one.
        inferred: rows of the report, and the row that counts each weight.
        layers: those rows, with their bytes by the formula.
        formula: the formula's figures.
        slots: bytes of the optimizer's slots, or None if there are none or unknown.
        optimizer: the names of the optimizers, or None if unknown.
        notes: remarks on the batch.
    """

    spec: StepSpec
    target: DeviceTarget | None
    opened: OpenedModel
    training: TrainingSettings
    cache: StepCache
    structure: Any
    inputs: list[ModelInput]
    batch_size: int
    inferred: Inferred
    layers: tuple[LayerMemory, ...]
    formula: Formula
    slots: int | None
    optimizer: str | None
    notes: tuple[str, ...]

    @property
    def is_on_card(self) -> bool:
        """Whether a card of the catalogue is named."""
        return self.target is not None and self.target.source == "catalogue"

    @property
    def is_fixed(self) -> bool:
        """Whether the model's input fixes the batch."""
        return any(tensor.shape[0] is not None for tensor in self.inputs)

    @property
    def loss(self) -> str | None:
        """The name of the loss, or None if unknown."""
        return loss_name(self.opened.model)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Differences between the step and the user's, for the first line of the answer."""
        of_data = () if self.training.batch is None else self.training.batch.caveats
        return (*self.opened.caveats, *(self.cache.assumptions or ()), *of_data)

    @property
    def opaque(self) -> tuple[str, ...]:
        """The names of the step's parts with inner values that no row counts."""
        model, names = self.opened.model, [*self.inferred.opaque]
        if self.spec.mode == "train":
            names += ["train_step"] if has_own_step(model) else []
            names += [] if self.slots is not None else ["optimizer"]
            parts = [part for part in compiled_parts(model) if is_opaque(part)]
            names += [getattr(part, "name", getattr(part, "__name__", str(part))) for part in parts]
        return tuple(names)

    @property
    def rows(self) -> list[str]:
        """The names of the layers in the report."""
        return [row.name for row in self.layers]

    def weights(self) -> dict[str, list[tuple[int, str | None]]]:
        """Return (bytes, row) of each weight by group, in the model's order."""
        model, owners = self.opened.model, self.inferred.owners
        groups = {"trainable": model.trainable_variables, "non_trainable": model.non_trainable_variables}
        return {
            name: [(variable_bytes(weight), owners.get(id(weight))) for weight in group]
            for name, group in groups.items()
        }

    def inner_bytes(self) -> int:
        """Return the largest bytes of the inner values of Keras's losses, metrics and optimizers in a training step."""
        model = self.opened.model
        if self.spec.mode != "train":
            return 0
        flat = [tensor.tensor(self.batch_size) for tensor in self.inputs]
        outputs = import_keras().tree.flatten(output_spec(model, self.structure, flat))
        elements = sum(math.prod(size or 1 for size in tensor.shape) for tensor in outputs)
        losses = max(len(compiled_parts(model)) - 1, 1)  # without the optimizer
        trained = sum(map(variable_bytes, model.trainable_variables))
        return MEASURED_LOSS * FLOAT32_BYTES * elements * losses + MEASURED_UPDATE * trained

    def prepare(self, jit_compile: bool) -> PreparedStep:
        """Prepare the step, or adapt the last one of the same mode and execution."""
        previous, mode = self.cache.prepared, self.spec.mode
        if previous is not None and (previous.mode, previous.jit_compile) != (mode, jit_compile):
            previous = None
        opened = self.opened
        self.cache.prepared = prepare_step(
            opened.model, self.training, self.structure, self.inputs, self.batch_size, mode, jit_compile, previous
        )
        return self.cache.prepared


def shape_step(spec: StepSpec, target: DeviceTarget | None, opened: OpenedModel, cache: StepCache) -> ShapedStep:
    """Infer a step's shapes by calling the model on symbolic tensors.

    Raises:
        UsageError: If the spec's input shapes or batch contradict the model's.
        ModelError: If the model cannot be called on them.
    """
    is_training = spec.mode == "train"
    structure, inputs = _inputs(opened, spec)
    fixed = [tensor.shape[0] for tensor in inputs if tensor.shape[0] is not None]
    batch, notes = _batch(spec, fixed)
    # A sample's figures do not depend on the batch, and TensorFlow counts elements in 31 bits.
    traced = batch if fixed else min(batch, LARGEST_TRACED_BATCH)
    training = spec.training()

    def outputs() -> Any:
        try:
            return output_spec(opened.model, structure, [tensor.tensor(traced) for tensor in inputs])
        except Exception as error:  # the model may raise anything
            raise not_callable(opened.model, inputs, _source(opened), error) from error

    if cache.assumptions is None and spec.mode != "inference":
        cache.assumptions = compile_model(opened.model, training, outputs)
    if traced not in cache.inferred:
        cache.inferred[traced] = _infer(spec.mode, opened, training, structure, inputs, traced)
    inferred, step_calls = cache.inferred[traced]
    slots, optimizer = None, optimizer_name(opened.model)
    if is_training and step_calls:
        slots = sum(map(variable_bytes, optimizer_variables(opened.model)))
        applied = [type(optimizer).__name__.lower() for optimizer in optimizers_of(opened.model) if optimizer.built]
        optimizer = ", ".join(applied) or optimizer
    elif is_training:
        slots = _slot_bytes(opened.model)
    layers = share_out(inferred.layers, batch, spec.mode)
    return ShapedStep(
        spec=spec,
        target=target,
        opened=opened,
        training=training,
        cache=cache,
        structure=structure,
        inputs=inputs,
        batch_size=batch,
        inferred=inferred,
        layers=layers,
        formula=formula(layers, batch, spec.mode),
        slots=slots,
        optimizer=optimizer,
        notes=notes if training.batch is None else (*notes, *training.batch.notes),
    )


def _source(opened: OpenedModel) -> str:
    return "" if opened.source == OBJECT_SOURCE else opened.source


def _slot_bytes(model: Any) -> int | None:
    """Build the optimizer's slots as shapes, and return their bytes, or None if that fails."""
    try:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return sum(map(variable_bytes, model.optimizer.variables))
    except Exception:  # the optimizer may be the user's
        return None


def _inputs(opened: OpenedModel, spec: StepSpec) -> tuple[Any, list[ModelInput]]:
    try:
        return spec.inputs(opened.model)
    except UsageError as error:
        if opened.source == OBJECT_SOURCE:
            raise
        raise UsageError(f"{opened.source}: {error}") from error


def _batch(spec: StepSpec, fixed: list[int]) -> tuple[int, tuple[str, ...]]:
    """Return one replica's batch (its share, or the one that inputs fix), and notes."""
    replicas, sizes = spec.replicas, sorted(set(fixed))
    share = -(-spec.samples // replicas)
    if len(sizes) > 1:
        raise UsageError(f"the model's inputs must fix one batch size; got {sizes}")
    batch = sizes[0] if sizes else share
    if batch != share and spec.batch_size is not None:
        raise UsageError(f"batch_size {share}: the model's input fixes the batch at {batch}")
    whole = spec.samples if batch == share else batch * replicas
    notes = [] if batch == share else [f"the model's input fixes the batch at {batch}"]
    if replicas > 1:
        uneven = ", the largest share" if whole % replicas else ""
        notes.append(f"one of {replicas} replicas: {batch:,} of the {whole:,} samples of a batch{uneven}")
    return batch, tuple(notes)


def _infer(
    mode: str,
    opened: OpenedModel,
    training: TrainingSettings,
    structure: Any,
    inputs: list[ModelInput],
    batch_size: int,
) -> tuple[Inferred, bool]:
    """Return the layers' rows, and whether the step was traced.

    Otherwise the model is called. The step is traced if it calls the layers itself: if the model has no `call`, or if
    its own training step has optimizers or takes other inputs than `call`, or with sparse or ragged data. On JAX the
    model is always called.
    """
    model, source = opened.model, _source(opened)
    on_tensorflow, is_own = not runs_on_jax(), mode == "train" and has_own_step(model)
    is_irregular = training.batch is not None and training.batch.is_irregular

    def trace() -> Any:
        return trace_step(prepare_step(model, training, structure, inputs, batch_size, mode))

    if on_tensorflow and (not has_call(model) or is_irregular or (is_own and keeps_optimizers(model))):
        return infer_layers(model, structure, inputs, batch_size, source, trace), True
    try:
        return infer_layers(model, structure, inputs, batch_size, source), False
    except ModelError:
        if not (is_own and on_tensorflow):
            raise
        return infer_layers(model, structure, inputs, batch_size, source, trace), True
