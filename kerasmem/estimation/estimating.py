"""`kerasmem.estimate`: one call for every method and every kind of model.

`estimate` builds a `StepSpec`, an `EstimateSession` opens the model and calls it on shapes (`ShapedStep`), a method of
`METHODS` estimates that step (`Outcome`), and the session makes the report (`MemoryReport`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from typing_extensions import Unpack

from kerasmem.compat.keras_layers import flatten_layers, functional_class
from kerasmem.devices.catalogue import DeviceTarget, find_card, resolve_device
from kerasmem.devices.host import default_memory_limit
from kerasmem.errors import ModelError, UsageError
from kerasmem.estimation.methods import step_outcome
from kerasmem.estimation.report import MemoryReport, ModelFacts, Outcome, Settings, device_verdict
from kerasmem.estimation.shapes import ShapedStep, StepCache, shape_step
from kerasmem.models.backend import import_keras, runs_on_jax
from kerasmem.models.opening import OpenedModel
from kerasmem.models.own_step import has_own_step
from kerasmem.models.spec import EstimateSettings, StepSpec, shows_settings
from kerasmem.models.weightless import random_state_kept
from kerasmem.processes.children import ChildFailure, Limits
from kerasmem.processes.forking import run_child

LONGEST = 1800.0  # time limit of an isolated estimate in seconds, the default of `kerasmem estimate`


@shows_settings()
def estimate(model: Any, *, isolated: bool = False, **settings: Unpack[EstimateSettings]) -> MemoryReport:
    """Estimate the memory for training a model, without allocating its weights.

    Args:
        model: a path (`.h5`, `.keras`, architecture `.json`), "package.module:function", a function that returns
            a model or the step function of a training loop, or a Keras model, which is traced as it is and left as it
            was.
        batch_size: samples in a batch. Defaults to that of `data` or of the model's input, else 32.
        method: "graph" (simulates TensorFlow's executor and allocator, on the card of `device` if it names one), "xla"
            (XLA's plan for this machine), "gpu-target" (XLA's plan for a card that is not here), "probe" (real steps
            at small batches), "formula" (shape inference, see `kerasmem.estimation.formula`) or "auto" (the method
            that matches how Keras would train). Defaults to "auto".
        optimizer: name of a Keras optimizer. Defaults to the one that the model was compiled with.
        loss: name of a loss. Defaults to the model's.
        dtype_policy: a Keras dtype policy such as "mixed_float16". Defaults to the model's.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes), for a verdict. Defaults to none.
        jit_compile: whether XLA compiles the step, for method "auto". Defaults to "auto", as Keras decides.
        mode: "train", "evaluate" (a forward pass with loss and metrics) or "inference". Defaults to "train".
        replicas: devices that train together under `tf.distribute`, each with the whole model and its share of the
            batch. The report is of one device. Defaults to 1.
        kernels: TensorFlow's CPU kernels in graph mode, "onednn" or "eigen", without special features of a CPU, so that
            all machines give the same estimate. Defaults to those of this machine.
        threads: number of TensorFlow's inter-op and intra-op threads in graph mode. Defaults to those of this process.
        input_shape: shape of an input with open dimensions, without the batch, or a mapping of names to shapes. For a
            model with a `train_step` and no `call()`: the shape of `x`, or {"0": …, "1": …} if `x` is a tuple. For a
            step function: shapes by argument name.
        target_shape: shape of the targets without the batch, if it does not follow from the loss: a shape, a mapping
            of names to shapes, or "none".
        target_dtype: dtype of the targets, if it does not follow from the loss.
        sample_weight: True if `fit` gets `sample_weight` or `class_weight`, or the weights' shape without the batch.
            Defaults to False.
        data: what `fit` gets, in place of shapes and dtypes: arrays, (x, y), (x, y, sample_weight), a
            `tf.data.Dataset`, a `PyDataset` such as `H5ChunkSequence`, or a generator, from which one batch is drawn.
            "file.py:function" or a function returns it. Defaults to None.
        factory: "package.module:function" that builds the model, if the file contains only weights.
        factory_args: keyword arguments for the function that builds the model.
        custom_objects: classes and functions of the file that are not Keras's, by name.
        trust: allow serialised Python in the file to run. Defaults to False.
        isolated: open the file in a subprocess, limited to 30 minutes and 80 % of the memory available to this job. Use
            it for files of unknown origin. The first call takes some seconds longer, later ones 0.1 s. Defaults to
            False.

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
    spec = StepSpec(model, **settings)
    if not isolated:
        return estimate_spec(spec)
    if not isinstance(spec.model, (str, os.PathLike)):
        raise UsageError("isolated=True needs a model file or module:function; got a model object or a function")
    return forked_report(spec.label, Limits(LONGEST, default_memory_limit()), lambda: estimate_spec(spec))


def estimate_spec(spec: StepSpec) -> MemoryReport:
    """Estimate the step that a spec describes."""
    with EstimateSession(spec) as session:
        return session.estimate()


def forked_report(label: str, limits: Limits, make_report: Callable[[], MemoryReport]) -> MemoryReport:
    """Make a report in a fork of a process with TensorFlow.

    Args:
        label: the model's name for messages.
        limits: limits of that process.
        make_report: makes the report.

    Raises:
        KerasmemError: As `make_report`. A crash or an exceeded limit raises `ModelError`.
    """
    try:
        return MemoryReport.from_dict(run_child(lambda: make_report().to_dict(), limits=limits))
    except ChildFailure as failure:
        raise ModelError(f"{label}: {failure.reason}") from failure


class EstimateSession:
    """Estimates one model at several batch sizes, devices and methods. Not thread-safe.

    The model stays open between estimates if it is a graph of layers. Other models are opened for each estimate.

    Args:
        spec: settings of the first estimate.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._stack = contextlib.ExitStack()
        self._opened: OpenedModel | None = None
        self._cache = StepCache()

    def __enter__(self) -> EstimateSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the model."""
        self._stack.close()
        self._opened = None

    def estimate(self, **changes: Any) -> MemoryReport:
        """Estimate the step.

        Args:
            **changes: settings that replace the spec's: `batch_size`, `device`, and `method` unless the spec's is
                "formula".

        Raises:
            KerasmemError: As `kerasmem.estimate`.
        """
        spec = replace(self._spec, **changes)
        target = None if spec.device is None else resolve_device(str(spec.device))
        _start_compiler(spec, target)
        with random_state_kept(), _garbage_collection_paused():
            try:
                opened = self._open()
                step = shape_step(spec, target, opened, self._cache)
                report = _report(step, step_outcome(step))
            except BaseException:
                self.close()
                raise
            if not _is_reusable(opened.model):
                self.close()
            return report

    def _open(self) -> OpenedModel:
        if self._opened is None:
            self._cache = StepCache()
            self._opened = self._stack.enter_context(self._spec.open_model())
        return self._opened


def _is_reusable(model: Any) -> bool:
    """Return whether an estimate leaves the model unchanged: a built graph of layers."""
    is_graph = isinstance(model, functional_class()) or (isinstance(model, import_keras().Sequential) and model.built)
    return is_graph and not has_own_step(model)


def _report(step: ShapedStep, outcome: Outcome) -> MemoryReport:
    target, layers = step.target, step.layers
    if outcome.layers is not None:
        sizes = [outcome.layers.get(row.name, 0) for row in layers]
        layers = tuple(replace(row, bytes=size, bytes_at_peak=size) for row, size in zip(layers, sizes, strict=True))
    return MemoryReport(
        model=ModelFacts(
            name=step.opened.model.name,
            source=step.opened.source,
            layers=sum(row.kind != "input" for row in layers),
            parameters=sum(row.parameters for row in layers),
            trainable_parameters=sum(row.trainable_parameters for row in layers),
        ),
        settings=Settings(
            batch_size=step.batch_size,
            optimizer=step.optimizer,
            loss=step.loss,
            dtype_policy=_policy(step.opened.model),
            mode=step.spec.mode,
            method=outcome.method,
            execution=outcome.execution,
            device=None if target is None else target.name,
            replicas=step.spec.replicas,
            stands_in=outcome.stands_in,
            **({} if outcome.kernels is None else outcome.kernels.profile),
        ),
        bytes=outcome.need,
        formula=step.formula,
        layers=layers,
        device=None if target is None else device_verdict(target, outcome),
        unmodelled=outcome.unmodelled,
        notes=(*step.opened.notes, *step.notes, *outcome.notes),
        pool=outcome.pool,
        instant=outcome.instant,
        fallback=outcome.fallback,
        caveats=(*step.caveats, *outcome.caveats),
    )


def _policy(model: Any) -> str:
    """Return the dtype policy of most layers with weights."""
    names = [layer.dtype_policy.name for layer in flatten_layers(model) if layer.weights or layer is model]
    return str(max(names, key=names.count))


def _start_compiler(spec: StepSpec, target: DeviceTarget | None) -> None:
    """Start the card's compiler in the background if it will probably be needed."""
    is_likely = spec.method == "auto" and spec.jit_compile is not False and (spec.replicas == 1 or runs_on_jax())
    if target is None or target.source != "catalogue" or not (is_likely or spec.method == "gpu-target"):
        return
    from kerasmem.estimation.gpu_target import start_compiler

    start_compiler(find_card(target.name))


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector, unless another thread may need it.

    Otherwise it would traverse all objects of TensorFlow and Keras again and again, for a tenth to a third of the time,
    though nearly all that an estimate allocates lives until its end. Daemon threads, such as a progress bar's, are
    ignored.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if not gc.isenabled() or not all(thread.daemon for thread in others):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
