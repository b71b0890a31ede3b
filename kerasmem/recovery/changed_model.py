"""The model with changes, its traits, and the memory of its arrays.

`build` is passed to `kerasmem.estimate` and `kerasmem.measure` like any function that builds a model. So the figures
of a remedy come from the model and step that the user would train, not from a rule of thumb.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.compat.keras_training import compile_arguments
from kerasmem.errors import ModelError
from kerasmem.estimation.allocator import LARGEST_WASTE, BFCAllocator, Buffer, Heap, smallest_limit
from kerasmem.estimation.report import SPREAD, Bytes, MemoryReport
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.compiling import compile_model
from kerasmem.models.document import is_factory_name
from kerasmem.models.opening import with_policy
from kerasmem.models.own_step import has_own_step
from kerasmem.models.sizes import element_bytes
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import output_spec, step_targets
from kerasmem.models.unchanged import state_restored
from kerasmem.models.weightless import random_state_kept, weightless
from kerasmem.recovery.changes import OPTIMIZERS, Traits
from kerasmem.recovery.transforms import head_start, takes_lora, with_lora, with_micro_batches
from kerasmem.training.recompute.building import recompute

LORA_RANK = 8
_MOST_BATCHES = 1000  # simulated; larger ones stand for more


def is_loaded(spec: StepSpec) -> bool:
    """Return whether the model is a file or an object rather than built by a function."""
    if spec.factory is not None:
        return False
    if isinstance(spec.model, (str, os.PathLike)):
        return not is_factory_name(os.fspath(spec.model))
    return hasattr(spec.model, "layers")


def build(origin: StepSpec, changes: Sequence[Mapping[str, Any]], rows: int = 32) -> Any:
    """Build the changed model, compiled for training. `open_model` calls it.

    Args:
        origin: the user's model and settings.
        changes: changes, as from `Change.to_data`.
        rows: samples of a step at once, for which recomputation is planned.

    Raises:
        KerasmemError: If the model cannot be opened or changed.
    """
    values = {change["kind"]: change["value"] for change in changes}
    changed = replace(origin, dtype_policy=values.get("dtype_policy", origin.dtype_policy))
    with contextlib.ExitStack() as stack:
        if isinstance(origin.model, import_keras().Model):  # who calls this function restores it
            model = with_policy(origin.model, changed.dtype_policy)
        else:
            model = stack.enter_context(changed.open_model()).model
        if "freeze" in values:
            for layer in model.layers[: head_start(model)]:
                layer.trainable = False
        if "lora" in values:
            model = with_lora(model, values["lora"])
        if "recompute" in values:
            with warnings.catch_warnings():  # the saving is estimated and shown
                warnings.simplefilter("ignore")
                model = recompute(model, batch_size=rows, input_shape=_input_shapes(origin, model))
        _compile(model, origin, values)
        if "micro_batches" in values:
            model = with_micro_batches(model, values["micro_batches"])
    return model


def _input_shapes(origin: StepSpec, model: Any) -> Any:
    if origin.data is None:
        return origin.input_shape
    return {tensor.name: tensor.shape[1:] for tensor in origin.inputs(model)[1]}


def _compile(model: Any, origin: StepSpec, values: Mapping[str, Any]) -> None:
    """Compile the changed model as the user's, with the optimizer of the changes."""
    training = origin.training()
    if {"freeze", "lora"} & set(values) and model.compiled and model.optimizer.built:  # with slots of other weights
        arguments = compile_arguments(model)
        optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        model.compile(**{**arguments, "optimizer": optimizer})
    if "optimizer" in values:
        lean = OPTIMIZERS[values["optimizer"]]
        training = replace(training, optimizer=lean.class_name.lower(), optimizer_config=lean.config)

    def outputs() -> Any:
        structure, inputs = origin.inputs(model)
        flat = [import_keras().KerasTensor(tensor.shape, tensor.dtype) for tensor in inputs]
        return output_spec(model, structure, flat)

    compile_model(model, training, outputs)


def traits_of(origin: StepSpec, batch_size: int) -> Traits:
    """Open a model without weights and read its traits.

    Raises:
        KerasmemError: If the model cannot be opened or compiled.
    """
    keras = import_keras()
    with random_state_kept(), weightless(), state_restored(origin):
        model = build(origin, [])
        layers = flatten_layers(model)
        start = head_start(model) if list(getattr(model, "layers", ())) else 0
        backbone = [inner for layer in list(model.layers)[:start] for inner in flatten_layers(layer)]
        return Traits(
            batch_size,
            has_own_step=has_own_step(model),
            has_batch_norm=any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers),
            head_start=start if any(layer.weights for layer in backbone) else 0,
            can_lora=any(takes_lora(layer, LORA_RANK) for layer in backbone),
            trains=origin.mode == "train",
        )


@dataclass(frozen=True)
class WholeArrays:
    """Bytes of arrays that Keras keeps on the device from the first step to the last.

    Attributes:
        samples: length of the arrays.
        copied: bytes of a sample of each copied array: inputs, and targets except for `predict`.
        outputs: bytes of a sample of each output that `predict` keeps; empty for other methods.
    """

    samples: int
    copied: tuple[int, ...]
    outputs: tuple[int, ...] = ()

    @property
    def step_bytes(self) -> int:
        """Bytes on the device during the last step."""
        return self.samples * sum(self.copied + self.outputs)

    @property
    def most_bytes(self) -> int:
        """Bytes of the arrays at the end, when `predict` has joined its outputs."""
        return self.step_bytes + self.samples * sum(self.outputs)

    def joined(self, report: MemoryReport, *, descending: bool) -> Bytes | None:
        """Return the need of `predict` when it joins the outputs of all batches, or None if it joins none.

        `predict` keeps the outputs of all batches, and then concatenates each one. The weights, the arrays and the
        last batch are still in memory. The simulated steps take the memory of the estimated one as one buffer.

        Args:
            report: the estimate of a step.
            descending: as for `BFCAllocator`.
        """
        batch = max(report.settings.batch_size, -(-self.samples // _MOST_BATCHES))
        if not self.outputs or self.samples <= report.settings.batch_size:
            return None  # a single batch is returned as it is
        heap = Heap(BFCAllocator(descending=descending))
        weights = [row.weight_bytes for row in report.layers if row.weight_bytes]
        kept = [heap.allocate(size) for size in (*weights, *(self.samples * size for size in self.copied))]
        constant = sum(weights) + batch * sum(self.copied + self.outputs)
        step = max(report.bytes.total - constant, 0)
        inputs: list[Buffer] = []
        for start in range(0, self.samples, batch):
            rows = min(batch, self.samples - start)
            previous, inputs = inputs, [heap.allocate(rows * size) for size in self.copied]
            scratch = heap.allocate(step * rows // batch)
            kept += [heap.allocate(rows * size) for size in self.outputs]
            for buffer in (scratch, *previous):
                heap.release(buffer)
        kept += [heap.allocate(self.samples * size) for size in self.outputs]
        total, least = heap.allocator.in_use, sum(buffer.bytes for buffer in kept)
        # As in graph mode: the largest buffer's chunk may be nearly twice as large.
        wasted = min(max(buffer.bytes for buffer in kept), LARGEST_WASTE)
        limit = smallest_limit(heap.requests(), descending=descending)
        return Bytes(total, least, max(limit, int(total * (1 + SPREAD["graph"])), total + wasted))


def whole_arrays(spec: StepSpec, samples: int) -> WholeArrays:
    """Return the arrays of `samples` rows that Keras keeps on the device.

    `fit` and `evaluate` keep a copy of inputs and targets. `predict` keeps a copy of the inputs and the outputs of all
    batches.

    Args:
        spec: the step.
        samples: length of the arrays.

    Raises:
        KerasmemError: If the model cannot be opened, or its shapes are unknown.
    """
    keras = import_keras()
    with random_state_kept(), weightless(), state_restored(spec):
        model = build(spec, [])
        structure, inputs = spec.inputs(model)
        batch = next((tensor.shape[0] for tensor in inputs if tensor.shape[0] is not None), 1)
        flat = [keras.KerasTensor((batch, *tensor.shape[1:]), tensor.dtype) for tensor in inputs]
        outputs = partial(output_spec, model, structure, flat)
        if spec.mode != "inference":
            targets = step_targets(model, spec.targets(), outputs, batch)
            return WholeArrays(samples, _sample_bytes([flat, targets], batch))
        try:
            return WholeArrays(samples, _sample_bytes(flat, batch), _sample_bytes(outputs(), batch))
        except Exception as error:  # the model's `call` may raise any exception
            raise ModelError(f"samples: the outputs of {model.name!r} are unknown: {keras_reason(error)}") from error


def _sample_bytes(tensors: Any, batch: int) -> tuple[int, ...]:
    flat = import_keras().tree.flatten(tensors)
    return tuple(
        math.prod(tensor.shape) * element_bytes(tensor.dtype) // batch for tensor in flat if tensor is not None
    )
