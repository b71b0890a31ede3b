"""Real steps in a subprocess that has loaded TensorFlow, for `measure`, `probe` and `max-batch --confirm`.

Both backends share one loop of steps, and differ in how a step runs and in how its memory is read.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerasmem.compat.keras_layers import supports_jit
from kerasmem.compat.keras_state import give_value, index_variables
from kerasmem.devices.host import held_bytes, process_status
from kerasmem.devices.kernels import CpuKernels, cpu_kernels
from kerasmem.errors import KerasmemError, ModelError, OutOfMemoryError
from kerasmem.models.backend import import_keras, keras_reason, runs_on_jax
from kerasmem.models.own_step import loop_is_compiled, optimizer_variables, optimizers_of
from kerasmem.models.sizes import element_bytes, variable_bytes
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import PreparedStep, batch_leaves, prepare_step
from kerasmem.models.weightless import shaped_variables

_PROCESS = Path("/proc/self")
_PAUSE, _PATIENCE = 0.02, 2.0  # seconds


@dataclass(frozen=True)
class MeasuredSteps:
    """Real steps at one batch size.

    Attributes:
        device: "CPU:0" or "GPU:0".
        execution: "graph" or "xla".
        batch_size: samples.
        weights: bytes of the model's variables.
        optimizer: bytes of the optimizer's variables, or None without an optimizer.
        inputs: bytes of one batch, targets included.
        first: peak of the first step, which also sets things up, in bytes.
        peaks: peak of each further step, in bytes.
        seconds: mean time of a further step.
        notes: assumptions about the training.
        way: source of the readings, or None for TensorFlow's allocator.
        kernels: kernels of the CPU, or None if the steps do not depend on them.
    """

    device: str
    execution: str
    batch_size: int
    weights: int
    optimizer: int | None
    inputs: int
    first: int
    peaks: tuple[int, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    way: str | None = None
    kernels: CpuKernels | None = None

    @property
    def median(self) -> int:
        """The median of the peaks, in bytes."""
        return int(statistics.median(self.peaks))


def real_steps(
    request: StepSpec, runs: Sequence[tuple[int, int, str]], seconds: float | None = None
) -> list[MeasuredSteps]:
    """Run steps of a model at one batch size after another.

    Args:
        request: the model and its training.
        runs: batch size, number of steps after the first one, and mode of each run.
        seconds: time after which no further step of a run begins, once two are done. Defaults to no limit.
    """
    session = JaxSession(request) if runs_on_jax() else TensorFlowSession(request)
    return [session.run(*run, seconds) for run in runs]


class Session:
    """A model with real weights, trained at one batch size after another.

    Args:
        request: the model and its training.

    Attributes:
        device: "CPU:0" or "GPU:0".
        jit_compile: whether XLA compiles the step.
        out_of_memory: the backend's errors if memory runs out.
        way: source of the readings, or None for TensorFlow's allocator.
        batch: tensors of the prepared step.
    """

    device = "CPU:0"
    jit_compile = True
    out_of_memory: tuple[type[Exception], ...] = ()
    way: str | None = None

    def __init__(self, request: StepSpec) -> None:
        self.request = request
        self.prepared: PreparedStep | None = None
        self.batch: Any = None
        self.take: Callable[[], Any] = lambda: None
        with request.open_model() as opened:
            self.model = opened.model
            self.structure, self.inputs = request.inputs(opened.model)
            self.training = request.training()
        with self._errors_named("with its weights"):
            give_values(self.model)

    def step_function(self, mode: str) -> Callable[[], Any]:
        """Return the function that runs one step on the batch."""
        raise NotImplementedError

    def step(self) -> int:
        """Run one step and return its peak in bytes."""
        raise NotImplementedError

    def run(self, batch_size: int, steps: int, mode: str, seconds: float | None = None) -> MeasuredSteps:
        """Run some steps at one batch size.

        Args:
            batch_size: samples.
            steps: number of steps after the first one, which also sets things up.
            mode: "train", "evaluate" or "inference".
            seconds: time after which no further step begins, once two are done. Defaults to no limit.

        Raises:
            ModelError: If the model's code fails, or memory runs out.
        """
        with self._errors_named(f"at batch size {batch_size}"):
            prepared = self._prepare(batch_size, mode)
            first = self.step()
            peaks: list[int] = []
            begin = time.monotonic()
            while len(peaks) < steps:
                peaks.append(self.step())
                if seconds is not None and len(peaks) >= 2 and time.monotonic() - begin > seconds:
                    break
            step_seconds = (time.monotonic() - begin) / max(len(peaks), 1)
        is_training = self.request.mode == "train" and optimizers_of(self.model)
        return MeasuredSteps(
            device=self.device,
            execution="xla" if self.jit_compile else "graph",
            batch_size=batch_size,
            weights=sum(map(variable_bytes, self.model.variables)),
            optimizer=sum(map(variable_bytes, optimizer_variables(self.model))) if is_training else None,
            inputs=sum(map(_tensor_bytes, import_keras().tree.flatten(self.batch))),
            first=first,
            peaks=tuple(peaks),
            seconds=step_seconds,
            notes=prepared.assumptions,
            way=self.way,
            kernels=None if self.jit_compile or self.device != "CPU:0" else cpu_kernels(),
        )

    def _prepare(self, batch_size: int, mode: str) -> PreparedStep:
        """Prepare the step and a batch of zeros."""
        keras, previous = import_keras(), self.prepared
        self.prepared = prepare_step(
            self.model, self.training, self.structure, self.inputs, batch_size, mode, self.jit_compile, previous
        )
        if previous is None:
            give_values(self.model)

        leaves = iter(batch_leaves(self.prepared))

        def fill(value: Any) -> Any:
            return next(leaves).zeros() if hasattr(value, "shape") else value  # a number

        self.batch = keras.tree.map_structure(fill, self.prepared.data)
        self.take = self.step_function(mode)
        return self.prepared

    @contextlib.contextmanager
    def _errors_named(self, when: str) -> Iterator[None]:
        """Raise errors of the model's code and of the allocator as KerasmemError."""
        name = f"model {self.model.name!r} {when}"
        try:
            yield
        except (KerasmemError, MemoryError):
            raise
        except self.out_of_memory as error:
            limit = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB") if self.device == "CPU:0" else None
            within = f" within its limit of {limit} MiB" if limit else ""
            raise OutOfMemoryError(
                f"{name} ran out of memory on {self.device}{within} ({_allocation(error)}); take a smaller batch"
            ) from error
        except Exception as error:  # the model's own code may raise anything
            raise ModelError(f"a step of {name} failed: {type(error).__name__}: {keras_reason(error)}") from error


class TensorFlowSession(Session):
    """Steps of `fit`, `evaluate` and `predict`, read from TensorFlow's allocator."""

    def __init__(self, request: StepSpec) -> None:
        import tensorflow as tf

        self.out_of_memory = (tf.errors.ResourceExhaustedError,)
        self.device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
        super().__init__(request)
        compiles = loop_is_compiled(self.model) if request.jit_compile == "auto" else request.jit_compile
        if compiles is None:
            compiles = self.device != "CPU:0" and supports_jit(self.model)
        self.jit_compile = bool(compiles)

    def step_function(self, mode: str) -> Callable[[], Any]:
        """Return Keras's function, a new one for each batch size.

        TensorFlow would trace an old one again, with an open batch.
        """
        model, kind = self.model, {"inference": "predict", "evaluate": "test"}.get(mode, "train")
        if kind == "predict":
            if model.run_eagerly is None or not model.compiled:
                model.run_eagerly = False
            model.jit_compile = self.jit_compile
        getattr(model, f"make_{kind}_function")(force=True)
        function = getattr(model, f"{kind}_function")
        if kind == "predict":
            return lambda: function([self.batch])
        source = self._batches() if self.device == "CPU:0" else None  # on a GPU each step would copy the batch
        return lambda: function(iter([self.batch]) if source is None else source)

    def _batches(self) -> Iterator[Any] | None:
        """Return an endless iterator of the batch, with the shapes that `fit` knows.

        Returns None if a model's input fixes the batch, or if the batch has Python numbers.
        """
        import tensorflow as tf

        tree, is_fixed = import_keras().tree, any(tensor.shape[0] is not None for tensor in self.inputs)
        leaves = [] if self.prepared is None else batch_leaves(self.prepared)
        if is_fixed or not all(hasattr(value, "shape") for value in tree.flatten(self.batch)):
            return None

        def opened(*batch: Any) -> Any:
            known = iter(leaves)

            def forget(tensor: Any) -> Any:  # the same buffer, with the shape that `fit` knows
                ((shape, _), *rest) = next(known).open_parts()
                return tensor if rest else tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tf.TensorShape(shape))

            return tree.map_structure(forget, batch if isinstance(self.batch, (tuple, list)) else batch[0])

        pipeline = tf.data.Options()
        pipeline.experimental_optimization.inject_prefetch = False
        data = tf.data.Dataset.from_tensors(tree.lists_to_tuples(self.batch)).map(opened).repeat()
        return iter(data.with_options(pipeline))

    def step(self) -> int:
        """Run one step and return its peak in bytes."""
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(self.device)
        outputs = self.take()
        for tensor in tf.nest.flatten(outputs):
            if hasattr(tensor, "numpy"):
                tensor.numpy()  # waits for the device
        del outputs
        return int(tf.config.experimental.get_memory_info(self.device)["peak"])


class JaxSession(Session):
    """Steps through Keras's `train_on_batch`, `test_on_batch` and `predict_on_batch`.

    Readings are the peak of JAX's allocator on a GPU, and resident memory on a CPU.
    """

    def __init__(self, request: StepSpec) -> None:
        import jax

        super().__init__(request)
        self._jax_device = jax.devices()[0]
        self.way = "resident memory, since JAX has no counters on a CPU"
        if self._jax_device.platform != "cpu":
            self.device = "GPU:0"
            self.way = "JAX's allocator, with the first step and its autotuning in its peak"

    def step_function(self, mode: str) -> Callable[[], Any]:
        """Return Keras's function for one batch."""
        name = {"train": "train_on_batch", "evaluate": "test_on_batch", "inference": "predict_on_batch"}[mode]
        batch = self.batch if isinstance(self.batch, tuple) else (self.batch,)
        return lambda: getattr(self.model, name)(*batch)

    def step(self) -> int:
        """Run one step and return its peak in bytes.

        On a CPU the peak is the bytes of all arrays before the step, and those that became resident during it.

        Raises:
            KerasmemError: If the system does not reset the process's peak.
        """
        import jax

        if self.device != "CPU:0":
            self.take()
            return int(self._jax_device.memory_stats()["peak_bytes_in_use"])  # of the process; cannot be reset
        before = sum(array.nbytes for array in jax.live_arrays())
        _settle()
        try:
            (_PROCESS / "clear_refs").write_text("5")  # the peak begins from what is resident now
        except OSError as error:
            raise KerasmemError(f"measure needs a system that resets a process's peak; got {error}") from error
        resident = process_status(_PROCESS)["VmHWM"]
        self.take()
        return before + process_status(_PROCESS)["VmHWM"] - resident


def give_values(model: Any) -> None:
    """Initialise every variable that was created without a value."""
    gc.collect()  # else garbage of the code that built the model would take memory
    for variable in shaped_variables():
        give_value(variable)
    for optimizer in optimizers_of(model):
        index_variables(optimizer)


def _tensor_bytes(tensor: Any) -> int:
    if not hasattr(tensor, "shape"):
        return 0
    return math.prod(tensor.shape) * element_bytes(import_keras().backend.standardize_dtype(tensor.dtype))


def _allocation(error: BaseException) -> str:
    """Return the line of TensorFlow's message that names the allocation."""
    lines = (line.strip() for line in str(error).splitlines())
    matching = (line[:300] for line in lines if "OOM when" in line or "ut of memory" in line)
    return next(matching, keras_reason(error))


def _settle() -> None:
    """Wait until threads have freed the last step's buffers, after its results."""
    last, now, end = -1, held_bytes(), time.monotonic() + _PATIENCE
    while now != last and time.monotonic() < end:
        time.sleep(_PAUSE)
        last, now = now, held_bytes()
