"""`kerasmem.estimate`: one call for every method and every kind of model."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import UsageError
from kerasmem.estimation.choice import Choice, Question, choose
from kerasmem.estimation.formula import formula, formula_bytes, opaque_layers, share_out
from kerasmem.estimation.layers import infer_layers
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.parallel.asking import check_method
from kerasmem.estimation.parallel.parallelism import Parallelism, parallelism
from kerasmem.estimation.report import (
    Bytes,
    DeviceVerdict,
    LayerMemory,
    MemoryReport,
    ModelFacts,
    Settings,
    Unmodelled,
)
from kerasmem.estimation.verdict import verdict
from kerasmem.models.inputs import ModelInput, model_inputs, normalise_input_shapes
from kerasmem.models.opening import OBJECT_SOURCE, NotRebuiltError, OpenedModel, open_model
from kerasmem.models.training import TrainingSettings, optimizer_slot_bytes, with_replaced

METHODS = ("auto", "graph", "xla", "gpu-target", "probe", "formula")
MODES = ("train", "evaluate", "inference")
DEFAULT_BATCH_SIZE = 32
LARGEST_TRACED_BATCH = 1024

# Keras is patched while a model is opened and called; two threads must not do that at once.
_ONE_AT_A_TIME = threading.RLock()


def estimate(
    model: Any,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    method: str = "auto",
    optimizer: str | None = None,
    loss: str | None = None,
    dtype_policy: str | None = None,
    device: str | int | None = None,
    jit_compile: bool | str = "auto",
    mode: str = "train",
    replicas: int = 1,
    parallel: str = "data",
    shard_optimizer: bool = False,
    layout: Any = None,
    input_shape: Any = None,
    factory: str | None = None,
    factory_args: Mapping[str, Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> MemoryReport:
    """Return how much memory training a model will take, without allocating its weights.

    Args:
        model: a path (`.h5`, `.keras`, architecture `.json`), "package.module:function", a function that returns
            a model, or a Keras model.
        batch_size: samples in a batch; where the model fixes its own, that one.
        method: "graph" (the step as TensorFlow runs it, simulated), "xla" (XLA's plan for this machine),
            "gpu-target" (XLA's plan for a card that is not here), "probe" (steps at small batches really run),
            "formula" (shape inference, see `kerasmem.estimation.formula`), or "auto": as Keras would train it.
        optimizer: a Keras optimizer's name in place of the one the model was compiled with.
        loss: the loss's name, for the record.
        dtype_policy: a Keras dtype policy ("mixed_float16") in place of the model's float32.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes): adds a verdict.
        jit_compile: for "auto": whether XLA compiles the step; "auto" as Keras decides.
        mode: "train", "evaluate" (a forward pass with loss and metrics) or "inference".
        replicas: devices that train together: the report is of one of them.
        parallel: "data" (each has the whole model and its share of the batch: `tf.distribute`, or with method "xla"
            `keras.distribution.DataParallel`) or "model" (each has a share of the weights: `ModelParallel`).
        shard_optimizer: under "data", each device keeps a share of the optimizer's slots.
        layout: under "model", which dimension of which weight is divided, as `keras.distribution.LayoutMap` has it:
            {".*/kernel": (None, "model")} or [".*/kernel=,model"]; without it, the largest that comes out even.
        input_shape: open dimensions of the inputs, without the batch: a shape, or name to shape.
        factory: "package.module:function" that builds the model a weights-only file belongs to.
        factory_args: keyword arguments for the function that builds the model.
        custom_objects: name to class or function, for what a file uses beyond Keras.
        trust: allow serialised Python in the file to run.

    Returns:
        A `MemoryReport`; all sizes in bytes.

    Raises:
        UsageError: an argument is wrong.
        ModelFileError: the file cannot be opened; its subclasses and the message say why and the way out.
        ModelError: the model cannot be built or called.

    Example:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        >>> kerasmem.estimate(model, batch_size=32).formula.total_bytes
        266064
    """
    _check(method, MODES, mode, batch_size, jit_compile)
    split = parallelism(replicas, parallel, shard_optimizer, layout)
    check_method(method, split)
    target = None if device is None else resolve_device(str(device))
    looks_at_step = method != "formula"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        stack.enter_context(_random_state_kept())
        options: dict[str, Any] = {
            "factory": factory, "factory_args": factory_args, "custom_objects": custom_objects, "trust": trust,
            "dtype_policy": dtype_policy,
        }  # fmt: skip
        reason = None
        try:
            opened = stack.enter_context(open_model(model, **options, shapes_only=looks_at_step))
        except NotRebuiltError as error:
            if method != "auto" or dtype_policy is not None:
                raise
            reason, looks_at_step = str(error), False
            opened = stack.enter_context(open_model(model, **options))
        training = with_replaced(opened.training, optimizer, loss)
        structure, inputs = _inputs(opened, input_shape)
        share = batch_size if split is None else split.share_of(batch_size)
        batch, notes = _settle_batch(share, [each.shape[0] for each in inputs])
        whole_batch = batch_size if split is None or batch == share else batch * batch_size // share
        if split is not None:
            notes.append(_of_several(split, batch, whole_batch))
        # A sample's figures do not depend on the batch, and TensorFlow counts elements in 31 bits.
        is_fixed = any(each.shape[0] is not None for each in inputs)
        traced = batch if is_fixed else min(batch, LARGEST_TRACED_BATCH)
        source = "" if opened.source == OBJECT_SOURCE else opened.source
        inferred = infer_layers(opened.model, structure, inputs, traced, source)
        layers = share_out(inferred.layers, batch, mode)
        slots, unmodelled = _not_in_the_formula(opened.model, training, layers, mode)
        need = formula_bytes(layers, batch, mode, slots)
        plain = formula(layers, batch, mode)
        facts, policy = _facts(opened, layers), _policy(opened.model)
        chosen = Choice(None, (), () if reason is None else (f"the formula, since {reason}",))
        if looks_at_step:
            how = {**options, "input_shape": input_shape, "optimizer": optimizer, "loss": loss}
            question = Question(
                opened.model, training, structure, inputs, inferred, batch, mode,
                formula_bytes=plain.total_bytes, source=model, options=how, is_fixed=is_fixed,
                split=split, whole_batch=whole_batch,
            )  # fmt: skip
            chosen = choose(method, jit_compile, target, question)
    notes = [*opened.notes, *notes, *chosen.notes]
    if chosen.outcome is None:
        notes += _notes(layers, need, plain.total_bytes)
        if split is not None and mode == "train":
            why = "gradients are gathered in buffers of their own where replicas exchange them"
            unmodelled = (*unmodelled, Unmodelled("exchange of gradients", why))
    else:
        need, unmodelled = _bytes(chosen.outcome), chosen.outcome.unmodelled
        at_peak = chosen.outcome.layers
        layers = tuple(
            replace(row, bytes=at_peak.get(row.name, 0), bytes_at_peak=at_peak.get(row.name, 0)) for row in layers
        )
        notes += chosen.outcome.notes
    return MemoryReport(
        model=facts,
        settings=Settings(
            batch_size=batch,
            optimizer=training.optimizer,
            loss=training.loss,
            dtype_policy=policy,
            mode=mode,
            method="formula" if chosen.outcome is None else chosen.outcome.method,
            execution="none" if chosen.outcome is None else chosen.outcome.execution,
            device=None if target is None else target.name,
            replicas=replicas,
            parallel=None if split is None else split.kind,
            shard_optimizer=split is not None and split.shard_optimizer,
        ),
        bytes=need,
        formula=plain,
        layers=layers,
        nested=inferred.nested,
        device=None
        if target is None
        else DeviceVerdict(
            target.name,
            target.memory_bytes,
            target.available_bytes,
            verdict(need, target.available_bytes),
            target.note,
        ),
        unmodelled=unmodelled,
        notes=tuple(notes),
        pool=None if chosen.outcome is None else chosen.outcome.pool,
        instant=None if chosen.outcome is None else chosen.outcome.instant,
        alternatives=chosen.alternatives,
    )


def _bytes(outcome: Outcome) -> Bytes:
    divided = outcome.categories or {}
    return Bytes(outcome.total, outcome.low, outcome.high, **{name: divided.get(name) for name in Bytes.CATEGORIES})


def _check(method: str, modes: tuple[str, ...], mode: str, batch_size: Any, jit_compile: Any) -> None:
    if method not in METHODS:
        raise UsageError(f"method {method!r}: this version has {', '.join(METHODS)}")
    if mode not in modes:
        raise UsageError(f"mode {mode!r}: choose from {', '.join(modes)}")
    if jit_compile not in (True, False, "auto"):
        raise UsageError(f"jit_compile {jit_compile!r}: choose True, False or 'auto'")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size {batch_size!r}: must be a whole number from 1")


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave the user's random numbers as if no model had been built here: Keras draws seeds from Python's."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _inputs(opened: OpenedModel, input_shape: Any) -> tuple[Any, list[ModelInput]]:
    try:
        return model_inputs(opened.model, normalise_input_shapes(input_shape))
    except UsageError as error:
        if opened.source == OBJECT_SOURCE:
            raise
        raise UsageError(f"{opened.source}: {error}") from error


def _settle_batch(asked: int, declared: list[int | None]) -> tuple[int, list[str]]:
    fixed = sorted({size for size in declared if size is not None})
    if len(fixed) > 1:
        raise UsageError(f"the model's inputs fix different batch sizes: {fixed}")
    if not fixed or fixed[0] == asked:
        return asked, []
    if asked != DEFAULT_BATCH_SIZE:
        raise UsageError(f"batch_size {asked}: the model's input fixes the batch at {fixed[0]}")
    return fixed[0], [f"the model's input fixes the batch at {fixed[0]}"]


def _of_several(split: Parallelism, batch: int, whole: int) -> str:
    if split.kind == "model":
        return f"one of {split.replicas} devices with a share of the weights each; each has the whole batch"
    note = f"one of {split.replicas} replicas: {batch:,} of the {whole:,} samples of a batch"
    return note if whole % split.replicas == 0 else f"{note}, the largest share"


def _facts(opened: OpenedModel, layers: tuple[LayerMemory, ...]) -> ModelFacts:
    return ModelFacts(
        name=opened.name,
        source=opened.source,
        layers=sum(row.kind != "input" for row in layers),
        parameters=sum(row.parameters for row in layers),
        trainable_parameters=sum(row.trainable_parameters for row in layers),
    )


def _policy(model: Any) -> str:
    """Return the policy that most layers with weights compute in."""
    names = [layer.dtype_policy.name for layer in flatten_layers(model) if layer.weights or layer is model]
    return str(max(set(names), key=names.count))


def _not_in_the_formula(
    model: Any, training: TrainingSettings, layers: tuple[LayerMemory, ...], mode: str
) -> tuple[int | None, tuple[Unmodelled, ...]]:
    """Return the optimizer's slots in bytes, and what the formula leaves out."""
    missing: list[Unmodelled] = []
    slots = None
    if mode == "train":
        assumed = training if training.optimizer else TrainingSettings("adam")
        slots = optimizer_slot_bytes(assumed, list(model.trainable_variables))
        name = f"slots of {assumed.optimizer}" + ("" if training.optimizer else " (assumed: the model is not compiled)")
        why = "what the optimizer keeps for each weight; the formula has weights and gradients only"
        missing.append(Unmodelled(f"optimizer {name}", why, slots))
    missing.append(Unmodelled("workspace", "scratch memory of convolutions and matrix products"))
    missing.append(Unmodelled("allocator", "rounding and waste in the chunks that the allocator hands out"))
    missing.append(Unmodelled("buffer reuse", "buffers are freed and reused within the step: deep networks need less"))
    unknown = [row.name for row in layers if row.activation_elements is None]
    if unknown:
        missing.append(Unmodelled(f"outputs of {_some(unknown)}", "their size depends on the data"))
    if opaque := opaque_layers(layers):
        why = "gates, states and attention scores, often many times the output, so no upper end is given"
        missing.append(Unmodelled(f"the inside of {_some(opaque)}", why))
    return slots, tuple(missing)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _notes(layers: tuple[LayerMemory, ...], need: Bytes, plain: int) -> list[str]:
    notes = []
    if need.total != plain:
        notes.append(
            f"at the true sizes of its dtypes the total is {need.total:,} B; "
            f"the formula, which takes every value as float32, gives {plain:,} B"
        )
    frozen = sum(row.parameters - row.trainable_parameters for row in layers)
    if frozen and need.gradients:
        notes.append(f"the formula counts a gradient for {frozen:,} parameters that are not trained")
    if any(row.dtype == "string" for row in layers):
        notes.append("text is counted as 24 bytes an element; longer text takes more")
    return notes
