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
from kerasmem.devices.catalogue import DeviceTarget, find_card, resolve_device
from kerasmem.devices.limits import default_memory_limit
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.estimation.arguments import DEFAULT_BATCH_SIZE, EstimateArguments
from kerasmem.estimation.assembling import assemble
from kerasmem.estimation.choice import ask
from kerasmem.estimation.report import MemoryReport
from kerasmem.estimation.tracing import OpenedStep, Step, open_step, trace_shapes
from kerasmem.models.weightless import random_state_kept
from kerasmem.processes.children import Limits, exit_reason
from kerasmem.processes.forking import ForkedCall

_LONGEST = 1800.0  # seconds of an isolated estimate, as many as `kerasmem estimate` has
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
    all_methods: bool = False,
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
        batch_size: samples in a batch; where the model fixes its own, that one.
        method: "graph" (the step as TensorFlow runs it, simulated; on the card that `device` names, if any), "xla"
            (XLA's plan for this machine), "gpu-target" (XLA's plan for a card that is not here), "probe" (steps at
            small batches really run), "formula" (shape
            inference, see `kerasmem.estimation.formula`), or "auto": as Keras would train it.
        optimizer: a Keras optimizer's name in place of the one the model was compiled with.
        loss: the loss's name, for the record.
        dtype_policy: a Keras dtype policy ("mixed_float16") in place of the model's float32.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes): adds a verdict.
        jit_compile: for "auto": whether XLA compiles the step; "auto" as Keras decides.
        all_methods: ask "graph", "xla" and, for a card, "gpu-target" as well, for `report.alternatives`.
        mode: "train", "evaluate" (a forward pass with loss and metrics) or "inference".
        replicas: devices that train together under `tf.distribute`, each with the whole model and its share of the
            batch. The report is of one of them. Defaults to 1.
        input_shape: open dimensions of the inputs, without the batch: a shape, or name to shape. Of a model with a
            `train_step` and no `call()` what `fit` gives it as `x`; {"0": …, "1": …} for a tuple. Of a step function
            what it takes, by name.
        target_shape: the targets', without the batch, where the loss cannot tell: a shape, name to shape, or "none".
        target_dtype: the targets', where the loss cannot tell.
        factory: "package.module:function" that builds the model a weights-only file belongs to.
        factory_args: keyword arguments for the function that builds the model.
        custom_objects: name to class or function, for what a file uses beyond Keras.
        trust: allow serialised Python in the file to run.
        isolated: open the file in a process of its own, for one of unknown origin: what takes more than half an hour,
            or 80 % of the memory that this job may have, is an error. A first call takes seconds, others 0.1 s more.

    Returns:
        A `MemoryReport`; all sizes in bytes.

    Raises:
        UsageError: an argument is wrong.
        ModelFileError: the file cannot be opened; its subclasses and the message say why and the way out.
        ModelError: the model cannot be built or called.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        >>> kerasmem.estimate(model, batch_size=32).formula.total_bytes
        266064
    """
    given = dict(locals())
    del given["isolated"]
    arguments = EstimateArguments(**given)
    return _in_child(arguments) if isolated else estimated(arguments)


class _Keeper:
    """Keeps the model that was estimated last open, for the next estimate of the same one."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._kept: tuple[EstimateArguments, OpenedStep] | None = None

    @contextlib.contextmanager
    def opened(self, arguments: EstimateArguments) -> Iterator[OpenedStep]:
        """Open the model for one estimate, or go on with the one that is open."""
        looks_at_step = arguments.method != "formula"
        question = replace(arguments, batch_size=1, device=None, method="auto" if looks_at_step else "formula")
        kept, self._kept = self._kept, None
        if kept is None or kept[0] != question:
            self.close()
            opened = self._stack.enter_context(open_step(arguments))
            kept = question, opened
        try:
            yield kept[1]
        except BaseException:
            self.close()
            raise
        if kept[1].serves_again:
            self._kept = kept
        else:
            self.close()

    def close(self) -> None:
        """Let the model go."""
        self._stack.close()
        self._kept = None


_keepers: list[_Keeper] = []


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """Open a model once for estimates inside that differ in batch size, device or method alone.

    Other threads wait with theirs until the scope ends.
    """
    with _ONE_AT_A_TIME:
        _keepers.append(_Keeper())
        try:
            yield
        finally:
            _keepers.pop().close()


def estimated(arguments: EstimateArguments) -> MemoryReport:
    """Return the report of `estimate`.

    Raises:
        KerasmemError: as `estimate`.
    """
    target = None if arguments.device is None else resolve_device(str(arguments.device))
    with (
        _ONE_AT_A_TIME, random_state_kept(), _collection_paused(), _compiler_ahead(arguments, target),
        (_keepers[-1].opened(arguments) if _keepers else open_step(arguments)) as opened,
    ):  # fmt: skip
        step = Step(arguments, opened, trace_shapes(arguments, opened))
        return assemble(step, ask(step, target), target)


def _compiler_ahead(arguments: EstimateArguments, target: DeviceTarget | None) -> AbstractContextManager[None]:
    """Return a scope in which the compiler for the card is on its way, where it will be asked."""
    is_meant = arguments.method == "auto" and arguments.jit_compile is not False and arguments.replicas == 1
    if target is None or target.source != "catalogue" or not (is_meant or arguments.method == "gpu-target"):
        return contextlib.nullcontext()
    from kerasmem.estimation.gpu_target.plan import compiler_ahead

    return compiler_ahead(find_card(target.name))


def _in_child(arguments: EstimateArguments) -> MemoryReport:
    """Return the report of a file that is opened in a process of its own."""
    if not isinstance(arguments.model, (str, os.PathLike)):
        raise UsageError("isolated: only a file, or module:function, is opened in a process of its own")
    limits = Limits(_LONGEST, default_memory_limit())
    return forked_report(os.fspath(arguments.model), limits, lambda: estimated(arguments))


def forked_report(where: str, limits: Limits, ask: Callable[[], MemoryReport]) -> MemoryReport:
    """Return a report that a process of its own makes; that one has TensorFlow loaded already, from the second call on.

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
    """Let Python look for no unreachable circles meanwhile: nearly all that is made here lives until the end.

    It would go through every object of TensorFlow and Keras again and again, for a tenth to a third of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
