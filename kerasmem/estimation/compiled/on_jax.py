"""The training step on Keras's JAX backend: a function of shapes, of a model without weights; and its compilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, symbolic_build
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.estimation.compiled.hlo import live_buffers, operation_names, origin, peak_of
from kerasmem.estimation.compiled.planned import instant_of
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.batch import output_spec, pack_inputs, step_targets
from kerasmem.models.compiling import compile_model
from kerasmem.models.inputs import ModelInput, model_inputs
from kerasmem.models.opening import OpenedModel
from kerasmem.models.own_step import has_own_step
from kerasmem.models.request import ModelRequest
from kerasmem.models.training import TrainingSettings, with_replaced
from kerasmem.processes.task import ChildFailure


@dataclass(frozen=True)
class JaxStep:
    """A step as `jax.jit` takes it.

    Attributes:
        function: of the state and the batch; the state is given up (donated) to it.
        variables: Keras's, in the groups that its step takes: "trainable", "non_trainable", "optimizer", "metrics", as
            far as it has them.
        data: shapes and dtypes (Keras tensors) of the batch.
        keeps_state: the step leaves the state as it is, so nothing is donated.
        optimizer: the optimizer's name as it appears in names of operations, or None.
        layers: the names of all layers.
        notes: what was assumed.
    """

    function: Callable[[Any, Any], Any]
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


def requested_step(opened: OpenedModel, request: ModelRequest, way_out: str) -> JaxStep:
    """Return the step of a model that another process, which runs on TensorFlow, asks about.

    Args:
        opened: the model and its training.
        request: how it is to be trained.
        way_out: what a user can do where the model has a step of its own.

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
        raise UsageError(f"model {model.name!r} has a train_step of its own, written for TensorFlow: {way_out}")
    training = with_replaced(opened.training, request.optimizer, request.loss, request.targets())
    return jax_step(model, training, structure, inputs, request.batch_size, request.mode)


def jax_step(
    model: Any, training: TrainingSettings, structure: Any, inputs: list[ModelInput], batch_size: int, mode: str
) -> JaxStep:
    """Compile a Keras model on JAX in place, build what its first step would, and return that step.

    Args:
        model: with or without weights.
        training: how it is trained.
        structure: how the model takes its inputs (from `model_inputs`).
        inputs: the inputs, without open dimensions but the batch.
        batch_size: samples.
        mode: "train", "evaluate" or "inference".

    Raises:
        ModelError: Keras refuses.
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

    return JaxStep(
        function={"train": model.train_step, "evaluate": model.test_step, "inference": predict}[mode],
        variables=variables,
        data=data,
        keeps_state=mode == "inference",
        optimizer=str(model.optimizer.name) if mode == "train" else None,
        layers=frozenset(str(layer.name) for layer in flatten_layers(model, include_self=False)),
        notes=notes,
    )


def shaped(tensor: Any, sharding: Any) -> Any:
    """Return the shape and dtype that JAX gives a Keras tensor, placed on its device or devices."""
    import jax

    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(tensor.dtype), sharding=sharding)


def lower(step: JaxStep, state: Any, data: Any, way_out: str = "", **options: Any) -> tuple[Any, dict[str, list[int]]]:
    """Return the step in the compiler's language, and the sizes of its arguments on a device in bytes, by group.

    The step's state is given up to it where it makes a new one.

    Args:
        step: the step.
        state: its variables' shapes, placed.
        data: the batch's, placed.
        way_out: what a user can do where JAX cannot trace the step.
        **options: of `jax.jit`, for a step that makes a new state.

    Raises:
        ChildFailure: the step cannot be traced on JAX.
    """
    import jax

    options = {} if step.keeps_state else {"donate_argnums": 0, **options}
    try:
        lowered = jax.jit(step.function, **options).lower(state, data)
    except KerasmemError:
        raise
    except Exception as error:
        reason = f"the step cannot be traced on JAX: {type(error).__name__}: {first_line(error)}{way_out}"
        raise ChildFailure(reason) from error
    groups = zip((*step.variables, "inputs"), (*state, data), strict=True)
    return lowered, {name: [_bytes(leaf) for leaf in jax.tree.leaves(group)] for name, group in groups}


def _bytes(spec: Any) -> int:
    return int(spec.dtype.itemsize * math.prod(spec.sharding.shard_shape(spec.shape)))


def dump_to(folder: str) -> dict[str, Any]:
    """Return the compiler's options with which it writes its texts into a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def compile_lowered(lowered: Any, options: dict[str, Any], where: str) -> Any:
    """Compile a lowered step.

    Raises:
        ChildFailure: XLA refuses.
    """
    try:
        return lowered.compile(compiler_options=options)
    except Exception as error:
        raise ChildFailure(f"XLA does not compile the step for {where}: {first_line(error)}") from error


def planned_bytes(compiled: Any) -> dict[str, int]:
    """Return the bytes of the step's arguments, of what it returns, of what both share, and of all in between."""
    memory = compiled.memory_analysis()
    return {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}


def at_peak(module: str, folder: str, step: JaxStep) -> dict[str, Any]:
    """Return what lives at the peak and when that is; nothing where XLA's dumps do not read as expected.

    Args:
        module: the compiled step's text.
        folder: where XLA wrote its dumps.
        step: the step.
    """
    dumps = sorted(Path(folder).glob("*live-range.txt"), key=lambda path: path.stat().st_size)
    instruction, live = peak_of(dumps[-1].read_text()) if dumps else (None, ())
    names = operation_names(module)
    operation = names.get(instruction or "")
    instant = None
    if operation is not None:
        instant = vars(instant_of(operation, *origin(operation, step.layers, step.optimizer)))
    return {"live": [vars(each) for each in live_buffers(live, names, step.layers, step.optimizer)], "instant": instant}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
