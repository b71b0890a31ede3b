"""Estimates of one model, opened once: for several batch sizes, devices and methods."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, functional_class
from kerasmem.devices.catalogue import DeviceTarget, find_card, resolve_device
from kerasmem.estimation.methods import step_outcome
from kerasmem.estimation.report import MemoryReport, ModelFacts, Outcome, Settings, device_verdict
from kerasmem.estimation.shapes import ShapedStep, StepCache, shape_step
from kerasmem.models.backend import import_keras
from kerasmem.models.opening import NotRebuiltError, OpenedModel
from kerasmem.models.own_step import has_own_step
from kerasmem.models.spec import StepSpec
from kerasmem.models.training import with_replaced
from kerasmem.models.weightless import random_state_kept


class EstimateSession:
    """Estimates of one model that differ in batch size, device or method. Not for several threads at once.

    The model stays open between estimates if it is a graph of layers; others are opened for each estimate.

    Args:
        spec: settings of the first estimate.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._stack = contextlib.ExitStack()
        self._opened: OpenedModel | None = None
        self._not_rebuilt: str | None = None  # the reason if a live model has no copy, so that only the formula answers
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
            **changes: settings in place of the spec's: `batch_size`, `device`, or `method` if that was not "formula".

        Raises:
            KerasmemError: As `kerasmem.estimate`.
        """
        spec = replace(self._spec, **changes)
        target = None if spec.device is None else resolve_device(str(spec.device))
        _start_compiler(spec, target)
        with random_state_kept(), _collection_paused():
            try:
                opened = self._open()
                step = shape_step(spec, target, opened, self._cache)
                report = _report(step, step_outcome(step, self._not_rebuilt))
            except BaseException:
                self.close()
                raise
            if not _serves_again(opened.model):
                self.close()
            return report

    def _open(self) -> OpenedModel:
        spec = self._spec
        if self._opened is None:
            self._cache = StepCache()
            try:  # for the formula alone a model object is used as it is
                opened = self._stack.enter_context(spec.opened(shapes_only=spec.method != "formula"))
            except NotRebuiltError as error:
                if spec.method != "auto" or spec.dtype_policy is not None:
                    raise
                self._not_rebuilt = str(error)
                opened = self._stack.enter_context(spec.opened())
            training = with_replaced(opened.training, spec.optimizer, spec.loss, spec.targets())
            self._opened = replace(opened, training=training)
        return self._opened


def _serves_again(model: Any) -> bool:
    """Return whether an estimate leaves the model as it was: if it is a graph of layers, and built."""
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
            loss=step.opened.training.loss,
            dtype_policy=_policy(step.opened.model),
            mode=step.spec.mode,
            method=outcome.method,
            execution=outcome.execution,
            device=None if target is None else target.name,
            replicas=step.spec.replicas,
            stands_in=outcome.stands_in,
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
    )


def _policy(model: Any) -> str:
    """Return the policy that most layers with weights compute in."""
    names = [layer.dtype_policy.name for layer in flatten_layers(model) if layer.weights or layer is model]
    return str(max(names, key=names.count))


def _start_compiler(spec: StepSpec, target: DeviceTarget | None) -> None:
    """Start the compiler for the card in the background if the estimate will probably use it."""
    is_meant = spec.method == "auto" and spec.jit_compile is not False and spec.replicas == 1
    if target is None or target.source != "catalogue" or not (is_meant or spec.method == "gpu-target"):
        return
    from kerasmem.estimation.gpu_target import start_compiler

    start_compiler(find_card(target.name))


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector if no other thread may need it.

    It would traverse all objects of TensorFlow and Keras again and again, for a tenth to a third of the time, and
    nearly all that an estimate allocates lives until its end. Daemon threads, such as a progress bar's, do not count.
    """
    others = [each for each in threading.enumerate() if each is not threading.current_thread() and not each.daemon]
    if not gc.isenabled() or others:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
