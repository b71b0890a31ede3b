"""The model with changes, its traits, and the memory of its arrays.

`build` is passed to `kerasmem.estimate` and `kerasmem.measure` like any function that builds a model. So the figures
of a remedy come from the model and step that the user would train, not from a rule of thumb.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.errors import ModelError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.compiling import compile_model
from kerasmem.models.document import is_factory_name
from kerasmem.models.own_step import has_own_step
from kerasmem.models.sizes import element_bytes
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import output_spec, step_targets
from kerasmem.models.weightless import random_state_kept, weightless
from kerasmem.recovery.changes import OPTIMIZERS, Traits
from kerasmem.recovery.transforms import head_start, takes_lora, with_lora, with_micro_batches
from kerasmem.training.recompute.building import recompute

LORA_RANK = 8


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
    with changed.open_model() as opened:
        model = opened.model
        if "freeze" in values:
            for layer in model.layers[: head_start(model)]:
                layer.trainable = False
        if "lora" in values:
            model = with_lora(model, values["lora"])
        if "recompute" in values:
            with warnings.catch_warnings():  # the saving is estimated and shown
                warnings.simplefilter("ignore")
                model = recompute(model, batch_size=rows, input_shape=origin.input_shape)
        _compile(model, origin, values)
        if "micro_batches" in values:
            model = with_micro_batches(model, values["micro_batches"])
    return model


def _compile(model: Any, origin: StepSpec, values: Mapping[str, Any]) -> None:
    """Compile the changed model as the user's, with the optimizer of the changes."""
    training = origin.training()
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
    with random_state_kept(), weightless():
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


def array_bytes(spec: StepSpec, samples: int) -> tuple[int, int]:
    """Return the bytes of arrays on the device during each step, and at the end of the method.

    `fit` and `evaluate` keep a copy of inputs and targets. `predict` keeps a copy of the inputs and the outputs of all
    batches, and joins the outputs at the end into one more copy.

    Args:
        spec: the step.
        samples: length of the arrays.

    Raises:
        KerasmemError: If the model cannot be opened, or its shapes are unknown.
    """
    keras = import_keras()
    with random_state_kept(), weightless():
        model = build(spec, [])
        structure, inputs = spec.inputs(model)
        batch = next((tensor.shape[0] for tensor in inputs if tensor.shape[0] is not None), 1)
        flat = [keras.KerasTensor((batch, *tensor.shape[1:]), tensor.dtype) for tensor in inputs]
        outputs = partial(output_spec, model, structure, flat)
        copied = samples * _tensor_bytes(flat) // batch
        if spec.mode == "inference":
            try:
                returned = samples * _tensor_bytes(outputs()) // batch
            except Exception as error:  # the model's `call` may raise any exception
                raise ModelError(
                    f"samples: the outputs of {model.name!r} are unknown: {keras_reason(error)}"
                ) from error
            return copied + returned, copied + 2 * returned
        copied += samples * _tensor_bytes(step_targets(model, spec.targets(), outputs, batch)) // batch
    return copied, copied


def _tensor_bytes(tensors: Any) -> int:
    flat = import_keras().tree.flatten(tensors)
    return sum(math.prod(tensor.shape) * element_bytes(tensor.dtype) for tensor in flat if tensor is not None)
