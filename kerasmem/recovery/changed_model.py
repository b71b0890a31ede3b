"""The function that builds the changed model for the estimator, here or in a process of its own.

It is given to `kerasmem.estimate` and `kerasmem.measure` as any function that builds a model, so the figures of a
remedy are those of the model and the step that the user would train, not of a rule of thumb.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kerasmem.models.backend import import_keras
from kerasmem.models.document import is_factory_name
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import OpenedModel
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import output_spec
from kerasmem.models.training import TrainingSettings, compile_model, training_of_copy, with_replaced
from kerasmem.recovery.changes import OPTIMIZERS
from kerasmem.recovery.transforms import head_start, with_lora, with_micro_batches
from kerasmem.training.recompute.building import recompute


def is_loaded(spec: StepSpec) -> bool:
    """Return whether the model comes from a file or an object, and no function builds it."""
    if spec.factory is not None:
        return False
    if isinstance(spec.model, (str, os.PathLike)):
        return not is_factory_name(os.fspath(spec.model))
    return hasattr(spec.model, "layers")


def build(origin: StepSpec, changes: Sequence[Mapping[str, Any]], rows: int = 32) -> Any:
    """Build the model with some changes, compiled as it will be trained; called inside `open_model`.

    Args:
        origin: the model as the user gave it.
        changes: as `Change.to_data` gave them.
        rows: samples that a step takes at once, for which recomputation is planned.

    Raises:
        KerasmemError: If the model cannot be opened or changed.
    """
    values = {each["kind"]: each["value"] for each in changes}
    changed = replace(origin, dtype_policy=values.get("dtype_policy", origin.dtype_policy))
    with changed.opened(shapes_only=True) as opened:
        model = opened.model
        training = _training(opened, origin, values)
        if "freeze" in values:
            for layer in model.layers[: head_start(model)]:
                layer.trainable = False
        if "lora" in values:
            model = with_lora(model, values["lora"])
        if "recompute" in values:
            with warnings.catch_warnings():  # the saving is estimated and shown
                warnings.simplefilter("ignore")
                model = recompute(model, batch_size=rows, input_shape=origin.input_shape)
        if not (model is opened.model and model.compiled and training.keeps_optimizer and training.keeps_loss):
            _compile(model, training, origin)
        if "micro_batches" in values:
            model = with_micro_batches(model, values["micro_batches"])
    return model


def _training(opened: OpenedModel, origin: StepSpec, values: Mapping[str, Any]) -> TrainingSettings:
    """Return the settings of the changed model's `compile`: a copy has none of its own."""
    training = opened.training
    if "recompute" in values and opened.model.compiled:
        training = training_of_copy(opened.model, training)
    training = with_replaced(training, origin.optimizer, origin.loss, origin.targets())
    if "optimizer" not in values:
        return training
    lean = OPTIMIZERS[values["optimizer"]]
    return replace(training, optimizer=lean.class_name.lower(), optimizer_config=lean.config, keeps_optimizer=False)


def _compile(model: Any, training: TrainingSettings, origin: StepSpec) -> None:
    keras = import_keras()
    structure, inputs = model_inputs(model, origin.input_shapes())
    flat = [keras.KerasTensor(each.shape, each.dtype) for each in inputs]
    compile_model(model, training, partial(output_spec, model, structure, flat), jit_compile=False)
