"""`kerasmem.recompute`: the same model with segments of its forward pass recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kerasmem.checks import whole
from kerasmem.compat.keras_layers import functional_class, graph_of
from kerasmem.compat.keras_training import compile_arguments
from kerasmem.devices.catalogue import DeviceTarget, resolve_device
from kerasmem.devices.kernels import CardKernels, CpuKernels, kernels_on
from kerasmem.devices.training_devices import training_kernels
from kerasmem.errors import UsageError, warn_user
from kerasmem.estimation.estimating import estimate
from kerasmem.models.backend import import_keras, runs_on_jax
from kerasmem.models.compiling import optimizer_slot_bytes
from kerasmem.models.inputs import model_inputs, normalise_input_shapes
from kerasmem.models.sizes import element_bytes, variable_bytes
from kerasmem.models.spec import DEFAULT_BATCH_SIZE
from kerasmem.training.recompute.cuts import chain_of, cut_positions, is_cuttable, split
from kerasmem.training.recompute.planning import (
    AUTO,
    LayerCall,
    RecomputePlan,
    describe_plan,
    nested_models,
    plan_segments,
    uncut,
)
from kerasmem.training.recompute.tracing import shaped_chain, trace_chain
from kerasmem.units import format_size

_TRIES = 4


def recompute(
    model: Any,
    segments: int | str = AUTO,
    *,
    memory: int | str | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    cuts: Sequence[str] | None = None,
    input_shape: Any = None,
) -> Any:
    """Recompute a model's activations in the backward pass, except those at a few cuts.

    Layers, weights, their names and the compiled state are shared with the original model, so weights and checkpoints
    are interchangeable. Gradients are the same, including dropout masks and statistics. Without a gradient it runs like
    the plain model. On JAX segments run in `jax.checkpoint`, and cuts are balanced by the layers' outputs.

    Args:
        model: a built Sequential or Functional Keras model.
        segments: number of segments; "auto" for the lowest peak or, with `memory`, the fewest recomputed layers.
            Defaults to "auto".
        memory: memory for a training step: bytes, a size ("8GB") or a card ("t4"). The plan is checked by
            `kerasmem.estimate`, and changed if it needs more. Defaults to no limit.
        batch_size: samples per batch, for the choice of the cuts; other batches run too. Defaults to 32.
        cuts: names of the last layers of the segments, instead of a plan; "mobilenet/conv1" is a layer of the model
            "mobilenet" inside the model. Cuts at the edges of such a model are added.
        input_shape: open dimensions of the inputs, as for `kerasmem.estimate`.

    Returns:
        A Functional model; its `plan` has the predictions, its `cuts` the names of the segments' last layers.
        Nested models are cut too if they are called once. If recomputation saves nothing, it warns, and with
        segments="auto" the model recomputes nothing. Keras saves it as the plain model, also inside another one, and
        it opens without kerasmem; `recompute(keras.saving.load_model(path), cuts=model.cuts)` recomputes it again.

    Raises:
        UsageError: If the model is not Sequential or Functional, or cannot be cut at `cuts`.
        ModelError: If the model cannot be traced.

    Examples:
        >>> import keras, kerasmem
        >>> layers = [keras.layers.Dense(64, activation="gelu", name=f"dense_{n}") for n in range(12)]
        >>> model = kerasmem.recompute(keras.Sequential([keras.Input((64,)), *layers]), segments=4)
        >>> model.cuts
        ('dense_2', 'dense_5', 'dense_8')
    """
    target = None if memory is None else resolve_device(str(memory))
    limit = None if target is None else target.available_bytes
    source = _functional(model)
    batch_size = whole("batch_size", batch_size)
    if cuts is not None and segments != AUTO:
        raise UsageError("cuts and segments exclude each other; give one")
    if runs_on_jax():
        steps = shaped_chain(source, batch_size, input_shape)
    else:
        loss = model.loss if model.compiled else None
        steps = trace_chain(source, batch_size, input_shape, loss, _kernels(model, target))
    persistent = _persistent_bytes(model, source, batch_size, input_shape)
    if cuts is not None:
        plan = describe_plan(steps, _ends(source, steps, cuts), batch_size, persistent, limit)
    else:
        choose = partial(plan_segments, steps, segments=segments, batch_size=batch_size, persistent_bytes=persistent)
        plan = choose(target_bytes=limit)
        if limit is not None:
            return _build_within(model, plan, choose, limit, input_shape)
    if plan.activation_bytes >= plan.plain_activation_bytes:
        warn_user(_no_saving_message(model, plan))
        if cuts is None and segments == AUTO:
            plan = uncut(plan)
    return build_recomputed(model, plan)


def _ends(source: Any, steps: Sequence[LayerCall], cuts: Sequence[str]) -> list[int]:
    """Return the ends of the segments between cuts."""
    split(source, cuts)  # checks the cuts
    positions = cut_positions(chain_of(source))
    ends = {positions[cut] for cut in cuts}
    for first, last in nested_models(steps):  # a segment recomputes calls of only one model
        if any(first < end < last for end in ends):
            ends |= {end for end in (first, last) if 0 < end < max(ends)}
    return [*sorted(ends), len(steps)]


def _kernels(model: Any, target: DeviceTarget | None) -> CpuKernels | CardKernels | None:
    """Return the kernels of a step, or None if XLA compiles it."""
    if model.compiled and model.jit_compile:
        return None
    is_named = target is not None and target.compute_capability is not None
    return kernels_on(target) if is_named else training_kernels()


def _no_saving_message(model: Any, plan: RecomputePlan) -> str:
    cuts = f"cut after {', '.join(plan.cuts)}" if plan.cuts else "at any cuts"
    return (
        f"kerasmem.recompute saves nothing in model {model.name!r}, {cuts}: at batch {plan.batch_size:,} activations "
        f"need {format_size(plan.activation_bytes)}, without it {format_size(plan.plain_activation_bytes)}. Frozen "
        "layers keep nothing; single layers, models called more than once and custom models cannot be cut inside"
    )


def build_recomputed(model: Any, plan: RecomputePlan) -> Any:
    """Return the model with the cuts of a plan, compiled like the model."""
    from kerasmem.training.recompute.model import RecomputedFunctional

    source = _functional(model)
    recomputed = RecomputedFunctional(source.input, source.output, name=model.name, cuts=plan.cuts)
    recomputed.plan = plan
    recomputed.dtype_policy = model.dtype_policy  # the global policy may have changed
    if model.compiled:
        recomputed.compile(**compile_arguments(model))  # the models share weights and optimizer
    return recomputed


def _build_within(
    model: Any, plan: RecomputePlan, choose: Callable[..., RecomputePlan], limit: int, input_shape: Any
) -> Any:
    """Return the model with cuts for which `kerasmem.estimate` stays within the limit too.

    Args:
        model: model to be cut.
        plan: first plan to try.
        choose: function from `target_bytes` to a plan.
        limit: memory of the step in bytes.
        input_shape: as for `recompute`.

    Raises:
        UsageError: If no plan stays within the limit.
    """
    aim = limit
    for _ in range(_TRIES):
        recomputed = build_recomputed(model, replace(plan, target_bytes=limit))
        need = estimate(recomputed, batch_size=plan.batch_size, input_shape=input_shape).bytes
        most = need.total if need.high is None else need.high
        if most <= limit:
            return recomputed
        aim -= most - limit
        try:
            plan = choose(target_bytes=max(aim, 1))
        except UsageError:
            break
    raise UsageError(
        f"memory {format_size(limit)} is too small: the step may need {format_size(most)} at batch "
        f"{plan.batch_size:,}, cut after {', '.join(recomputed.cuts) or 'no layer'}; use a smaller batch"
    )


def _functional(model: Any) -> Any:
    """Return the graph of layers of a model.

    Raises:
        UsageError: If the model has no such graph.
    """
    keras = import_keras()

    if not isinstance(model, keras.Model):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise UsageError(f"model must be a Keras model; got {kind}; load a file with keras.saving.load_model")
    source = graph_of(model)
    if source is None:
        raise UsageError(f"model {model.name!r} is not built yet: begin it with keras.Input(shape), or call build()")
    if not is_cuttable(model):
        fix = "build its deep part as a Functional or Sequential model, and recompute that"
        if isinstance(source, functional_class()):
            fix = "call kerasmem.recompute(keras.Model(model.inputs, model.outputs)) in your class"
        raise UsageError(
            f"model {model.name!r} must be Sequential or Functional; got the subclass {type(model).__name__}: {fix}"
        )
    return source


def _persistent_bytes(model: Any, source: Any, batch_size: int, input_shape: Any) -> int:
    """Return the bytes of weights, the optimizer's slots and the batch."""
    _, inputs = model_inputs(source, normalise_input_shapes(input_shape))
    batch = 0
    for tensor in inputs:
        batch += batch_size * math.prod(size or 1 for size in tensor.shape[1:]) * element_bytes(tensor.dtype)
    weights = sum(variable_bytes(variable) for variable in source.variables)
    slots = optimizer_slot_bytes(getattr(model, "optimizer", None), list(source.trainable_variables)) or 0
    return weights + slots + batch
