"""The training step on Keras's JAX backend: a function of shapes, of a model without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, symbolic_build
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.batch import output_spec, pack_inputs, target_spec
from kerasmem.models.compiling import compile_model, has_own_step
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import OpenedModel
from kerasmem.models.request import ModelRequest
from kerasmem.models.training import with_replaced


@dataclass(frozen=True)
class JaxStep:
    """A step as `jax.jit` takes it.

    Attributes:
        function: of the state and the batch; the state is given up (donated) to it.
        state: shapes and dtypes (Keras tensors) of variables, in the groups that Keras's step takes.
        groups: the names of those groups: "trainable", "non_trainable", "optimizer", "metrics", as far as it has them.
        data: likewise of the batch.
        keeps_state: the step leaves the state as it is, so nothing is donated.
        optimizer: the optimizer's name as it appears in names of operations, or None.
        layers: the names of all layers.
        notes: what was assumed.
    """

    function: Callable[[Any, Any], Any]
    state: tuple[list[Any], ...]
    groups: tuple[str, ...]
    data: Any
    keeps_state: bool
    optimizer: str | None
    layers: frozenset[str]
    notes: tuple[str, ...]


def jax_step(opened: OpenedModel, request: ModelRequest) -> JaxStep:
    """Compile the opened model as the request says and return its step.

    Raises:
        ModelError: Keras refuses.
        UsageError: the model brings a training step of its own, or its batch size contradicts the request.
    """
    model = opened.model
    structure, inputs = model_inputs(model, request.input_shapes())
    fixed = {each.shape[0] for each in inputs if each.shape[0] is not None}
    if len(fixed) > 1 or fixed - {request.batch_size}:
        raise UsageError(f"batch_size {request.batch_size}: the model's inputs fix the batch at {sorted(fixed)}")
    if request.mode != "inference" and has_own_step(model):
        raise UsageError(
            f"model {model.name!r} has a train_step of its own, which was written for TensorFlow and does not run on "
            "JAX, through which gpu-target compiles; use method='xla' or 'graph'"
        )
    keras = import_keras()
    flat = [keras.KerasTensor((request.batch_size, *each.shape[1:]), each.dtype) for each in inputs]
    x = pack_inputs(structure, flat)
    try:
        outputs = output_spec(model, structure, flat)
        if request.mode == "inference":
            return _predict(model, x)
        notes = compile_model(
            model, with_replaced(opened.training, request.optimizer, request.loss), outputs, jit_compile=True
        )
        y = target_spec(model.loss, outputs, request.batch_size)
        symbolic_build(model, (x, y))
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be prepared on JAX: {keras_reason(error)}") from error
    trains = request.mode == "train"
    groups = {
        "trainable": model.trainable_variables,
        "non_trainable": model.non_trainable_variables,
        **({"optimizer": model.optimizer.variables} if trains else {}),
        "metrics": model.metrics_variables,
    }
    return JaxStep(
        function=model.train_step if trains else model.test_step,
        state=tuple(_shapes(group) for group in groups.values()),
        groups=tuple(groups),
        data=(x, y),
        keeps_state=False,
        optimizer=str(model.optimizer.name) if trains else None,
        layers=_layer_names(model),
        notes=notes,
    )


def _predict(model: Any, x: Any) -> JaxStep:
    def predict(state: Any, data: Any) -> Any:
        return model.predict_step(state, data)[0]

    groups = (model.trainable_variables, model.non_trainable_variables)
    state = tuple(_shapes(group) for group in groups)
    return JaxStep(predict, state, ("trainable", "non_trainable"), x, True, None, _layer_names(model), ())


def _layer_names(model: Any) -> frozenset[str]:
    return frozenset(str(layer.name) for layer in flatten_layers(model, include_self=False))


def _shapes(variables: list[Any]) -> list[Any]:
    """Return shapes alone: reading a variable's value would make one."""
    tensor = import_keras().KerasTensor
    return [tensor(tuple(variable.shape), str(variable.dtype)) for variable in variables]
