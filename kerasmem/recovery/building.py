"""The function that builds the changed model for the estimator, here or in a process of its own.

It is given to `kerasmem.estimate` and `kerasmem.measure` as any function that builds a model, so the figures of a
remedy are those of the model and the step that the user would train, not of a rule of thumb.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kerasmem.models.backend import import_keras
from kerasmem.models.batch import output_spec
from kerasmem.models.compiling import compile_model
from kerasmem.models.inputs import BY_THE_LOSS, GivenTargets, model_inputs, normalise_input_shapes
from kerasmem.models.names import is_factory_name
from kerasmem.models.opening import OpenedModel, open_model
from kerasmem.models.request import ModelRequest, open_request
from kerasmem.models.training import TrainingSettings, training_of_copy, with_replaced
from kerasmem.recovery.changes import OPTIMIZERS
from kerasmem.recovery.transforms import head_start, with_lora, with_micro_batches
from kerasmem.training.recompute.building import recomputed


@dataclass(frozen=True)
class Origin:
    """The model as the user gave it: the arguments of `open_model`, and another optimizer and loss.

    Attributes:
        source: a path, a name, a function or a Keras model; or, in another process, the `ModelRequest` for it.
        options: `factory`, `factory_args`, `custom_objects`, `trust`, `dtype_policy`.
        optimizer: a Keras optimizer's name in place of the model's own.
        loss: a loss's name in place of the model's own.
        input_shape: open dimensions of the inputs.
        targets: what the user says of them.
    """

    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    loss: str | None = None
    input_shape: Any = None
    targets: GivenTargets = BY_THE_LOSS

    @property
    def is_loaded(self) -> bool:
        """Whether the model comes from a file or an object, and no function builds it."""
        if self.options.get("factory") is not None:
            return False
        if isinstance(self.source, (str, os.PathLike)):
            return not is_factory_name(os.fspath(self.source))
        return hasattr(self.source, "layers")

    def model_options(self) -> dict[str, Any]:
        """Return the arguments of `kerasmem.estimate` that describe the model, without its inputs."""
        return {**self.options, **self.targets.options(), "optimizer": self.optimizer, "loss": self.loss}

    @classmethod
    def of_request(cls, data: Mapping[str, Any]) -> Origin:
        """Return the origin that `ModelRequest.to_dict` described."""
        request = ModelRequest.from_dict(data)
        return cls(request, {}, request.optimizer, request.loss, request.input_shapes() or None, request.targets())

    def opened(self, dtype_policy: str | None = None) -> contextlib.AbstractContextManager[OpenedModel]:
        """Open the model without weights, with another dtype policy if one is given."""
        policy = {} if dtype_policy is None else {"dtype_policy": dtype_policy}
        if isinstance(self.source, ModelRequest):
            return open_request(replace(self.source, **policy))  # type: ignore[arg-type]
        return open_model(self.source, **{**self.options, **policy}, shapes_only=True)


def build(origin: Origin | Mapping[str, Any], changes: Sequence[Mapping[str, Any]], rows: int = 32) -> Any:
    """Build the model with some changes, compiled as it will be trained; called inside `open_model`.

    Args:
        origin: the model, as an `Origin` or, in another process, as `ModelRequest.to_dict` gave it.
        changes: as `Change.to_data` gave them.
        rows: samples that a step takes at once, for which recomputation is planned.

    Raises:
        KerasmemError: If the model cannot be opened or changed.
    """
    values = {each["kind"]: each["value"] for each in changes}
    own = origin if isinstance(origin, Origin) else Origin.of_request(origin)
    with own.opened(values.get("dtype_policy")) as opened:
        model = opened.model
        training = _training(opened, own, values)
        if "freeze" in values:
            for layer in model.layers[: head_start(model)]:
                layer.trainable = False
        if "lora" in values:
            model = with_lora(model, values["lora"])
        if "recompute" in values:
            model, _ = recomputed(model, batch_size=rows, input_shape=own.input_shape)
        if not (model is opened.model and model.compiled and training.keeps_optimizer and training.keeps_loss):
            _compile(model, training, own.input_shape)
        if "micro_batches" in values:
            model = with_micro_batches(model)
    return model


def _training(opened: OpenedModel, origin: Origin, values: Mapping[str, Any]) -> TrainingSettings:
    """Return the settings of the changed model's `compile`: a copy has none of its own."""
    training = opened.training
    if "recompute" in values and opened.model.compiled:
        training = training_of_copy(opened.model, training)
    training = with_replaced(training, origin.optimizer, origin.loss, origin.targets)
    if "optimizer" not in values:
        return training
    lean = OPTIMIZERS[values["optimizer"]]
    return replace(training, optimizer=lean.class_name.lower(), optimizer_config=lean.config, keeps_optimizer=False)


def _compile(model: Any, training: TrainingSettings, input_shape: Any) -> None:
    keras = import_keras()
    structure, inputs = model_inputs(model, normalise_input_shapes(input_shape))
    flat = [keras.KerasTensor(each.shape, each.dtype) for each in inputs]
    compile_model(model, training, partial(output_spec, model, structure, flat), jit_compile=False)
