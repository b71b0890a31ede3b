"""`kerasmem.estimate`: one call for every method and every kind of model.

An estimate has four steps, each with its own result: the model is opened (`OpenedStep`), called on shapes
(`TracedShapes`), methods are asked about its step (`Answer`), and the report is put together (`MemoryReport`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

from kerasmem.checks import Method, Mode
from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.devices.catalogue import DeviceTarget, find_card, resolve_device
from kerasmem.devices.limits import default_memory_limit
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.estimation.arguments import DEFAULT_BATCH_SIZE, EstimateArguments
from kerasmem.estimation.choice import Answer, ask
from kerasmem.estimation.formula import formula_bytes, opaque_layers
from kerasmem.estimation.report import Bytes, LayerMemory, MemoryReport, ModelFacts, Outcome, Settings, Unmodelled
from kerasmem.estimation.tracing import OpenedStep, Step, open_step, trace_shapes
from kerasmem.estimation.verdict import device_verdict
from kerasmem.models.weightless import random_state_kept
from kerasmem.processes.children import Limits, exit_reason
from kerasmem.processes.forking import ForkedCall

LONGEST = 1800.0  # seconds of an isolated estimate, as many as `kerasmem estimate` has
# Keras is patched while a model is opened and called; two threads must not do that at once.
_ONE_AT_A_TIME = threading.RLock()


def estimate(
    model: Any,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    method: Method = "auto",
    optimizer: str | None = None,
    loss: str | None = None,
    dtype_policy: str | None = None,
    device: str | int | None = None,
    jit_compile: bool | Literal["auto"] = "auto",
    mode: Mode = "train",
    replicas: int = 1,
    input_shape: Any = None,
    target_shape: Any = None,
    target_dtype: str | None = None,
    factory: str | None = None,
    factory_args: Mapping[str, Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    trust: bool = False,
    isolated: bool = False,
) -> MemoryReport:
    """Return how much memory training a model will take, without allocating its weights.

    Args:
        model: a path (`.h5`, `.keras`, architecture `.json`), "package.module:function", a function that returns
            a model or the step function of a training loop, or a Keras model.
        batch_size: samples in a batch. Ignored if the model fixes its own. Defaults to 32.
        method: "graph" (simulates TensorFlow's executor and allocator; on the card of `device`, if it names one),
            "xla" (XLA's plan for this machine), "gpu-target" (XLA's plan for a card that is not here), "probe" (runs
            real steps at small batches), "formula" (shape inference, see `kerasmem.estimation.formula`), or "auto":
            the method that matches how Keras would train. Defaults to "auto".
        optimizer: name of a Keras optimizer. Defaults to the one that the model was compiled with.
        loss: name of a loss, for the record. Defaults to the model's.
        dtype_policy: a Keras dtype policy such as "mixed_float16". Defaults to the model's.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes). Adds a verdict to the report.
        jit_compile: whether XLA compiles the step, for method "auto". Defaults to "auto", as Keras decides.
        mode: "train", "evaluate" (a forward pass with loss and metrics) or "inference". Defaults to "train".
        replicas: devices that train together under `tf.distribute`, each with the whole model and its share of the
            batch. The report is of one of them. Defaults to 1.
        input_shape: open dimensions of the inputs, without the batch: a shape, or name to shape. Of a model with a
            `train_step` and no `call()` what `fit` gives it as `x`; {"0": …, "1": …} for a tuple. Of a step function
            what it takes, by name.
        target_shape: shape of the targets without the batch, if it does not follow from the loss: a shape, a mapping
            of names to shapes, or "none".
        target_dtype: dtype of the targets, if it does not follow from the loss.
        factory: "package.module:function" that builds the model a weights-only file belongs to.
        factory_args: keyword arguments for the function that builds the model.
        custom_objects: classes and functions of the file that are not Keras's, by name.
        trust: allow serialised Python in the file to run. Defaults to False.
        isolated: open a file of unknown origin in a subprocess, limited to half an hour and to 80 % of the memory that
            this job may have. The first call takes seconds, others 0.1 s more. Defaults to False.

    Returns:
        A `MemoryReport`; all sizes in bytes.

    Raises:
        UsageError: If an argument is wrong.
        ModelFileError: If the file cannot be opened. Its subclass and message give the reason and the fix.
        ModelError: If the model cannot be built or called.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        >>> kerasmem.estimate(model, batch_size=32).formula.total_bytes
        266064
    """
    given = dict(locals())
    del given["isolated"]
    arguments = EstimateArguments(**given)
    return _in_child(arguments) if isolated else _estimated(arguments)


class EstimateSession:
    """Estimates that differ in batch size, device or method alone, of a model that is opened once if it allows that.

    Other threads wait with their estimates until the session ends.

    Args:
        arguments: of the first estimate.
    """

    def __init__(self, arguments: EstimateArguments) -> None:
        self._arguments = arguments
        self._stack = contextlib.ExitStack()
        self._opened: tuple[bool, OpenedStep] | None = None  # whether its step is looked at, and the model

    def __enter__(self) -> EstimateSession:
        _ONE_AT_A_TIME.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        _ONE_AT_A_TIME.release()

    def estimate(self, **changes: Any) -> MemoryReport:
        """Return the report of a step.

        Args:
            **changes: of `batch_size`, `device` and `method`.

        Raises:
            KerasmemError: As `kerasmem.estimate`.
        """
        arguments = replace(self._arguments, **changes)
        target = None if arguments.device is None else resolve_device(str(arguments.device))
        with random_state_kept(), _collection_paused(), _compiler_ahead(arguments, target):
            try:
                opened = self._open(arguments)
                step = Step(arguments, opened, trace_shapes(arguments, opened))
                report = _report(step, ask(step, target), target)
            except BaseException:
                self._close()
                raise
            if not opened.serves_again:
                self._close()
            return report

    def _open(self, arguments: EstimateArguments) -> OpenedStep:
        looks_at_step = arguments.method != "formula"
        if self._opened is None or self._opened[0] != looks_at_step:
            self._close()
            self._opened = looks_at_step, self._stack.enter_context(open_step(arguments))
        return self._opened[1]

    def _close(self) -> None:
        self._stack.close()
        self._opened = None


def _estimated(arguments: EstimateArguments) -> MemoryReport:
    with EstimateSession(arguments) as session:
        return session.estimate()


def _report(step: Step, answer: Answer, target: DeviceTarget | None) -> MemoryReport:
    shapes, opened, found = step.shapes, step.opened, answer.outcome or _by_formula(step)
    need = Bytes(found.total, found.low, found.high, **found.categories, optional_workspace=found.optional_workspace)
    layers = shapes.layers
    if found.layers is not None:
        sizes = [found.layers.get(row.name, 0) for row in layers]
        layers = tuple(replace(row, bytes=size, bytes_at_peak=size) for row, size in zip(layers, sizes, strict=True))
    return MemoryReport(
        model=ModelFacts(
            name=opened.name,
            source=opened.source,
            layers=sum(row.kind != "input" for row in shapes.layers),
            parameters=sum(row.parameters for row in shapes.layers),
            trainable_parameters=sum(row.trainable_parameters for row in shapes.layers),
        ),
        settings=Settings(
            batch_size=shapes.batch_size,
            optimizer=step.optimizer,
            loss=opened.training.loss,
            dtype_policy=_policy(opened.model),
            mode=step.arguments.mode,
            method=found.method,
            execution=found.execution,
            device=None if target is None else target.name,
            replicas=step.arguments.replicas,
        ),
        bytes=need,
        formula=shapes.formula,
        layers=layers,
        nested=shapes.inferred.nested,
        device=None if target is None else device_verdict(target, need),
        unmodelled=found.unmodelled,
        notes=(*opened.notes, *shapes.notes, *answer.notes, *found.notes),
        pool=found.pool,
        instant=found.instant,
    )


def _by_formula(step: Step) -> Outcome:
    shapes = step.shapes
    need = formula_bytes(shapes.layers, shapes.batch_size, step.arguments.mode, shapes.slots)
    return Outcome(
        "formula", "none", need.total, need.low, need.high,
        categories={name: getattr(need, name) for name in Bytes.CATEGORIES},
        layers=None,
        unmodelled=tuple(_not_in_the_formula(step)),
        notes=tuple(_formula_notes(shapes.layers, need, shapes.formula.total_bytes)),
    )  # fmt: skip


def _not_in_the_formula(step: Step) -> list[Unmodelled]:
    layers, is_training = step.shapes.layers, step.arguments.mode == "train"
    missing: list[Unmodelled] = []
    if is_training:
        own = step.optimizer
        name = f"slots of {own}" if own else "slots of adam (assumed: no optimizer is stored with the model)"
        why = "what the optimizer keeps for each weight; the formula has weights and gradients only"
        missing.append(Unmodelled(f"optimizer {name}", why, step.shapes.slots))
    missing.append(Unmodelled("workspace", "scratch memory of convolutions and matrix products"))
    missing.append(Unmodelled("allocator", "rounding and waste in the chunks that the allocator hands out"))
    missing.append(Unmodelled("buffer reuse", "buffers are freed and reused within the step: deep networks need less"))
    unknown = [row.name for row in layers if row.activation_elements is None]
    if unknown:
        missing.append(Unmodelled(f"outputs of {_some(unknown)}", "their size depends on the data"))
    if opaque := opaque_layers(layers):
        why = "gates, states and attention scores, often many times the output, so no upper end is given"
        missing.append(Unmodelled(f"the inside of {_some(opaque)}", why))
    if step.arguments.replicas > 1 and is_training:
        why = "gradients are gathered in buffers of their own where replicas exchange them"
        missing.append(Unmodelled("exchange of gradients", why))
    return missing


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _formula_notes(layers: tuple[LayerMemory, ...], need: Bytes, plain: int) -> list[str]:
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


def _policy(model: Any) -> str:
    """Return the policy that most layers with weights compute in."""
    names = [layer.dtype_policy.name for layer in flatten_layers(model) if layer.weights or layer is model]
    return str(max(names, key=names.count))


def _compiler_ahead(arguments: EstimateArguments, target: DeviceTarget | None) -> AbstractContextManager[None]:
    """Start the compiler for the card in the background if the estimate will use it."""
    is_meant = arguments.method == "auto" and arguments.jit_compile is not False and arguments.replicas == 1
    if target is None or target.source != "catalogue" or not (is_meant or arguments.method == "gpu-target"):
        return contextlib.nullcontext()
    from kerasmem.estimation.gpu_target.plan import compiler_ahead

    return compiler_ahead(find_card(target.name))


def _in_child(arguments: EstimateArguments) -> MemoryReport:
    """Return the report of a file that is opened in a process of its own."""
    if not isinstance(arguments.model, (str, os.PathLike)):
        raise UsageError("isolated: only a file, or module:function, is opened in a process of its own")
    limits = Limits(LONGEST, default_memory_limit())
    return forked_report(os.fspath(arguments.model), limits, lambda: _estimated(arguments))


def forked_report(where: str, limits: Limits, ask: Callable[[], MemoryReport]) -> MemoryReport:
    """Make a report in a forked process that has already loaded TensorFlow, from the second call on.

    Args:
        where: the model, for messages.
        limits: of that process.
        ask: makes the report.

    Raises:
        KerasmemError: as `ask`; whatever else goes wrong, a crash or a limit included, is a `ModelError`.
    """
    call = ForkedCall(lambda: ask().to_dict(), (), {}, limits=limits, output=False, modules=[__name__])
    with call:
        call.run()
        answer = None if call.failure is not None else call.answer()
    if answer is None:
        assert call.code is not None
        ended = f"the process was ended by {exit_reason(call.code)}"
        raise ModelError(f"{where}: {ended if call.failure is None else call.failure.reason}")
    if "value" in answer:
        return MemoryReport.from_dict(answer["value"])
    if isinstance(answer["error"], KerasmemError):
        raise answer["error"]
    raise ModelError(f"{where}: {answer['class']}: {answer['message']}")


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector.

    It would traverse all objects of TensorFlow and Keras again and again, for a tenth to a third of the time, and
    nearly all that an estimate allocates lives until its end.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
