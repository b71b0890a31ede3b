"""The training step on JAX: compiled, built, and not yet run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, symbolic_build
from kerasmem.errors import KerasmemError, ModelError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.batch import output_spec, pack_inputs, step_targets
from kerasmem.models.compiling import compile_model
from kerasmem.models.inputs import ModelInput
from kerasmem.models.training import TrainingSettings


@dataclass(frozen=True)
class SymbolicStep:
    """A step on JAX with shapes for its batch and variables.

    Attributes:
        function: Keras's, of the state and the batch; the state is given up (donated) to it.
        variables: Keras's, in the groups that its step takes: "trainable", "non_trainable", "optimizer", "metrics", as
            far as it has them.
        data: shapes and dtypes (Keras tensors) of the batch.
        keeps_state: the step leaves the state as it is, so nothing is donated.
        optimizer: the optimizer's name as it appears in names of operations, or None.
        layers: the names of all layers.
        notes: assumptions.
    """

    function: Callable[..., Any]
    variables: dict[str, list[Any]]
    data: Any
    keeps_state: bool
    optimizer: str | None
    layers: frozenset[str]
    notes: tuple[str, ...]

    def state(self) -> tuple[list[Any], ...]:
        """Return shapes and dtypes of the variables alone: reading a variable's value would make one."""
        tensor = import_keras().KerasTensor
        return tuple(
            [tensor(tuple(each.shape), str(each.dtype)) for each in group] for group in self.variables.values()
        )


def symbolic_step(
    model: Any, training: TrainingSettings, structure: Any, inputs: list[ModelInput], batch_size: int, mode: str
) -> SymbolicStep:
    """Compile and build a Keras model on JAX in place, and return its step.

    Args:
        model: with or without weights.
        training: how it is trained.
        structure: how the model takes its inputs (from `model_inputs`).
        inputs: the inputs, without open dimensions but the batch.
        batch_size: samples.
        mode: "train", "evaluate" or "inference".

    Raises:
        ModelError: If Keras refuses.
    """
    keras = import_keras()
    flat = [keras.KerasTensor((batch_size, *each.shape[1:]), each.dtype) for each in inputs]
    x = pack_inputs(structure, flat)
    try:
        outputs = cache(partial(output_spec, model, structure, flat))
        notes: tuple[str, ...] = ()
        data = x
        if mode != "inference":
            notes = compile_model(model, training, outputs, jit_compile=True)
            data = (x, step_targets(model, training.targets, outputs, batch_size))
            symbolic_build(model, data)
        else:
            outputs()
            data = (x,)  # several inputs alone would be taken for inputs and targets
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be prepared on JAX: {keras_reason(error)}") from error
    variables = {"trainable": model.trainable_variables, "non_trainable": model.non_trainable_variables}
    if mode == "train":
        variables["optimizer"] = model.optimizer.variables
    if mode != "inference":
        variables["metrics"] = model.metrics_variables

    def predict(state: Any, data: Any) -> Any:
        return model.predict_step(state, data)[0]

    return SymbolicStep(
        function={"train": model.train_step, "evaluate": model.test_step, "inference": predict}[mode],
        variables=variables,
        data=data,
        keeps_state=mode == "inference",
        optimizer=str(model.optimizer.name) if mode == "train" else None,
        layers=frozenset(str(layer.name) for layer in flatten_layers(model, include_self=False)),
        notes=notes,
    )
