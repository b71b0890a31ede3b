"""The child process: opens the model with real weights, runs real steps, and reads TensorFlow's allocator.

Run by `kerasmem.processes.task.run_child`, never imported by the parent's process for its side effects.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from typing import Any

from kerasmem.compat.keras_layers import supports_jit
from kerasmem.compat.keras_variables import give_value
from kerasmem.devices.recording import start_recording
from kerasmem.errors import KerasmemError, ModelError
from kerasmem.models.backend import keras_reason
from kerasmem.models.inputs import model_inputs
from kerasmem.models.own_loop import loop_is_compiled
from kerasmem.models.own_step import optimizer_variables, optimizers_of
from kerasmem.models.request import ModelRequest, open_request
from kerasmem.models.step import PreparedStep, prepare_step
from kerasmem.models.training import with_replaced
from kerasmem.models.weightless import shaped_variables
from kerasmem.processes.fork_server import prepare_devices
from kerasmem.processes.task import serve

# Names of the marks in the recording, with the batch's place in the request as their number.
MARKS = "kerasmem-"
BATCH_MARK, FIRST_MARK, STEP_MARK = MARKS + "batch", MARKS + "first", MARKS + "step"


def work(data: dict[str, Any]) -> dict[str, Any]:
    """Run the steps that were asked for.

    Args:
        data: `request` (a `ModelRequest`); `runs`, a list of {"batch_size", "steps"}, and "mode" where it is not the
            request's; `folder` for the recording, None for none; `seconds`, after which no further step is begun once
            two of a run are done; `limit`, bytes for TensorFlow's allocator.

    Returns:
        The answer, JSON-ready: `device`, `execution`, `batch_size`, `weights`, `optimizer` (bytes), `notes`, and for
        each run `batch_size`, `inputs` (bytes), `before` (bytes in use before the steps), `peaks` (bytes, one a step,
        without the first, which also sets things up), `first` (that one's), `seconds` a step. Where memory ran out
        within a `limit`, only `ran_out`: the reason.
    """
    folder, limit = data.get("folder"), data.get("limit")
    prepare_devices(limit)
    import tensorflow as tf

    if folder is not None:
        start_recording(folder)
    try:
        session = Session(ModelRequest.from_dict(data["request"]), folder is not None)
        seconds = data.get("seconds")
        runs = [session.run(run["batch_size"], run["steps"], seconds, run.get("mode")) for run in data["runs"]]
    except (StepRanOutError, tf.errors.ResourceExhaustedError) as error:
        if limit is None:
            raise
        return {"ran_out": str(error) if isinstance(error, StepRanOutError) else _reason(error)}
    if folder is not None:
        tf.profiler.experimental.stop()
    return {**session.facts(), "runs": runs}


class StepRanOutError(ModelError):
    """A step ran out of the device's memory."""


class Session:
    """One model with real weights, trained at one batch size after the other."""

    def __init__(self, request: ModelRequest, is_traced: bool) -> None:
        import tensorflow as tf

        self.request, self.is_traced, self.count = request, is_traced, 0
        self.device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
        self.jit_compile = False
        self.prepared: PreparedStep | None = None
        with open_request(request) as opened:
            self.model, self.training = opened.model, opened.training
            self.structure, self.inputs = model_inputs(opened.model, request.input_shapes())
        give_values()

    def run(self, batch_size: int, steps: int, seconds: float | None, mode: str | None = None) -> dict[str, Any]:
        """Train for some steps at one batch size, or do what another mode does."""
        import tensorflow as tf

        self.count += 1
        try:
            data, function = self._prepare(batch_size, mode or self.request.mode)
            with self.mark(BATCH_MARK):
                tensors = tf.nest.map_structure(_filled, data)
            before = self.memory()["current"]
            first = self.step(function, tensors, FIRST_MARK)
            peaks: list[int] = []
            begin = time.monotonic()
            while len(peaks) < steps:
                peaks.append(self.step(function, tensors, STEP_MARK))
                if seconds is not None and len(peaks) >= 2 and time.monotonic() - begin > seconds:
                    break
            took = (time.monotonic() - begin) / max(len(peaks), 1)
        except tf.errors.ResourceExhaustedError as error:
            raise StepRanOutError(_out_of_memory(error, self.model.name, batch_size, self.device)) from None
        except (KerasmemError, MemoryError):
            raise
        except Exception as error:
            raise ModelError(
                f"a step of model {self.model.name!r} at batch size {batch_size} failed: "
                f"{type(error).__name__}: {_reason(error)}"
            ) from error
        return {
            "batch_size": batch_size,
            "inputs": sum(tensor_bytes(tensor) for tensor in tf.nest.flatten(tensors)),
            "before": before,
            "first": first,
            "peaks": peaks,
            "seconds": took,
        }

    def facts(self) -> dict[str, Any]:
        """Return what holds for all runs."""
        is_training = self.request.mode == "train" and bool(optimizers_of(self.model))
        slots = sum(tensor_bytes(each.value) for each in optimizer_variables(self.model))
        return {
            "device": self.device,
            "execution": "xla" if self.jit_compile else "graph",
            "weights": sum(tensor_bytes(each.value) for each in self.model.variables),
            "optimizer": slots if is_training else None,
            "notes": [] if self.prepared is None else list(self.prepared.notes),
        }

    def _prepare(self, batch_size: int, mode: str) -> tuple[Any, Callable[[Any], Any]]:
        """Return specs of the batch, and a function that takes such a batch and runs the step."""
        model, request = self.model, self.request
        known = self.prepared
        if known is None:
            wanted = request.jit_compile
            if wanted == "auto":
                compiles = loop_is_compiled(model)
                wanted = self.device != "CPU:0" and supports_jit(model) if compiles is None else compiles
            self.jit_compile = bool(wanted)
        training = with_replaced(self.training, request.optimizer, request.loss, request.targets())
        self.prepared = prepare_step(
            model, training, self.structure, self.inputs, batch_size, mode, self.jit_compile, known
        )
        if known is None:
            give_values()
        # A new function for each batch size: the last one would be traced again, for any batch size.
        kind = {"inference": "predict", "evaluate": "test"}.get(mode, "train")
        if kind == "predict":
            if model.run_eagerly is None or not model.compiled:
                model.run_eagerly = False
            model.jit_compile = self.jit_compile
        getattr(model, f"make_{kind}_function")(force=True)
        function = getattr(model, f"{kind}_function")
        return self.prepared.data, lambda tensors: function([tensors] if kind == "predict" else iter([tensors]))

    def step(self, function: Callable[[Any], Any], tensors: Any, mark: str) -> int:
        """Run one step and return its peak in use, in bytes."""
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(self.device)
        with self.mark(mark):
            outputs = function(tensors)
            for tensor in tf.nest.flatten(outputs):
                if hasattr(tensor, "numpy"):
                    tensor.numpy()  # waits for the device
            del outputs
        return int(self.memory()["peak"])

    def mark(self, name: str) -> Any:
        """Return a context that marks a place in the recording, where there is one."""
        import tensorflow as tf

        if not self.is_traced:
            return contextlib.nullcontext()
        return tf.profiler.experimental.Trace(name, step_num=self.count)

    def memory(self) -> Any:
        """Return the allocator's statistics."""
        import tensorflow as tf

        return tf.config.experimental.get_memory_info(self.device)


def give_values() -> None:
    """Initialise every variable that was made without a value, of whatever holds it."""
    gc.collect()  # else what the code that built the model has given up would take memory now
    for variable in shaped_variables():
        give_value(variable)


def _filled(spec: Any) -> Any:
    """Return a tensor of zeros, made the same way whatever its size."""
    import tensorflow as tf

    return tf.fill(spec.shape, tf.constant("" if spec.dtype == tf.string else 0, spec.dtype))


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor."""
    size = tensor.dtype.size or 0
    return int(size * tensor.shape.num_elements())


def _out_of_memory(error: Any, name: str, batch_size: int, device: str) -> str:
    limit = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB")
    within = f" within its limit of {limit} MiB" if limit and device.startswith("CPU") else ""
    return (
        f"model {name!r} at batch size {batch_size} ran out of memory on {device}{within} ({_reason(error)}); "
        "take a smaller batch"
    )


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    found = [line for line in lines if "OOM when" in line or "ut of memory" in line]
    return found[0][:300] if found else keras_reason(error)


if __name__ == "__main__":
    serve(work)
