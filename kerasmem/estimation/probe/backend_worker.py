"""The child process where Keras runs on JAX or PyTorch: real weights, real steps, and what memory they take.

Run by `kerasmem.processes.task.run_child`, never imported by the parent's process for its side effects.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from kerasmem.devices.host import held_bytes, process_status
from kerasmem.errors import KerasmemError, ModelError, first_line
from kerasmem.estimation.probe.worker import give_values
from kerasmem.models.backend import TORCH, import_keras, keras_backend, torch_serves
from kerasmem.models.inputs import model_inputs
from kerasmem.models.request import ModelRequest, open_request
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.symbolic_step import SymbolicStep, symbolic_step
from kerasmem.models.training import with_replaced
from kerasmem.processes.task import serve

_PROCESS = Path("/proc/self")
_PAUSE, _PATIENCE = 0.02, 2.0  # seconds


def work(data: dict[str, Any]) -> dict[str, Any]:
    """Run the steps that were asked for.

    Args:
        data: `request` (a `ModelRequest`); `runs`, a list of {"batch_size", "steps"}.

    Returns:
        The answer, JSON-ready, as `worker.work` has it, with `way`: how memory was read.
    """
    with torch_serves():
        return _work(ModelRequest.from_dict(data["request"]), data["runs"])


def _work(request: ModelRequest, asked: list[dict[str, Any]]) -> dict[str, Any]:
    with open_request(request) as opened:
        model = opened.model
        structure, inputs = model_inputs(model, request.input_shapes())
        training = with_replaced(opened.training, request.optimizer, request.loss, request.targets())
    give_values()
    meter = _torch_meter() if keras_backend() == TORCH else _jax_meter()
    runs = []
    for run in asked:
        step = symbolic_step(model, training, structure, inputs, run["batch_size"], request.mode)
        give_values()
        try:
            runs.append(_run(model, step, request.mode, run, meter))
        except (KerasmemError, MemoryError):
            raise
        except Exception as error:
            what = f"a step of model {model.name!r} at batch size {run['batch_size']}"
            raise ModelError(f"{what} failed: {type(error).__name__}: {first_line(error)}") from error
    slots = sum(map(variable_bytes, model.optimizer.variables)) if request.mode == "train" else None
    return {
        "device": meter.device,
        "execution": meter.execution,
        "weights": sum(map(variable_bytes, model.variables)),
        "optimizer": slots,
        "notes": list(step.notes),
        "runs": runs,
        "way": meter.way,
    }


class _Meter(Protocol):
    """Reads what steps take. `device` is "CPU:0" or "GPU:0", `execution` how Keras runs them, `way` how it reads."""

    device: str
    execution: str
    way: str

    def peaks(self, functions: Iterator[Callable[[], object]], held: int) -> list[int]:
        """Return the most that was in use while each function ran.

        Args:
            functions: taken one after another.
            held: bytes of variables and batch, as far as they are known beforehand.
        """


def _jax_meter() -> _Meter:
    import jax

    device = jax.devices()[0]
    return _Resident() if device.platform == "cpu" else _Statistics(device)


def _torch_meter() -> _Meter:
    import torch

    return _CudaStatistics() if torch.cuda.is_available() else _Profiled()


class _Resident:
    """This process's resident memory: JAX counts nothing on a CPU."""

    device, execution = "CPU:0", "xla"
    way = "resident memory, since JAX counts nothing on a CPU"

    def peaks(self, functions: Iterator[Callable[[], object]], held: int) -> list[int]:
        """Return the peak of each function."""
        return [self._peak(function) for function in functions]

    def _peak(self, function: Callable[[], object]) -> int:
        """Return the most that was in use while a function ran: live arrays, and what came to be resident meanwhile.

        Raises:
            KerasmemError: the system does not let the process's peak be reset.
        """
        import jax

        before = sum(array.nbytes for array in jax.live_arrays())
        self._settle()
        try:
            (_PROCESS / "clear_refs").write_text("5")  # the peak begins from what is resident now
        except OSError as error:
            raise KerasmemError(f"the system does not reset this process's peak ({error}): measure needs it") from error
        resident = process_status(_PROCESS)["VmHWM"]
        function()
        return before + process_status(_PROCESS)["VmHWM"] - resident

    @staticmethod
    def _settle() -> None:
        """Wait until threads have let go of what the step before took; and give free heap back, so that a peak is seen.

        A step's results can be had before its buffers are freed.
        """
        last, now, end = -1, held_bytes(), time.monotonic() + _PATIENCE
        while now != last and time.monotonic() < end:
            time.sleep(_PAUSE)
            last, now = now, held_bytes()


class _Statistics:
    """The statistics of JAX's allocator on a card, whose peak is the process's: it cannot be reset."""

    device, execution = "GPU:0", "xla"
    way = "JAX's allocator, whose peak has the first step and its autotuning in it"

    def __init__(self, device: Any) -> None:
        self._device = device

    def peaks(self, functions: Iterator[Callable[[], object]], held: int) -> list[int]:
        """Return the most that was in use since the process began, after each function."""
        found = []
        for function in functions:
            function()
            found.append(int(self._device.memory_stats()["peak_bytes_in_use"]))
        return found


class _Profiled:
    """PyTorch's profiler on a CPU, which sees every block that is taken and given back.

    Blocks that were there before it began it does not see go, so that all steps run under one profiler.
    """

    device, execution = "CPU:0", "eager"
    way = "PyTorch's profiler"
    _MARK, _BLOCK = "kerasmem step", "[memory]"

    def peaks(self, functions: Iterator[Callable[[], object]], held: int) -> list[int]:
        """Return the peak of each function: what is held, and what it takes beyond."""
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            for function in functions:
                with torch.profiler.record_function(self._MARK):
                    function()
        with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text("utf-8"))["traceEvents"]
        events = sorted((each for each in events if each.get("name") in (self._BLOCK, self._MARK)), key=_time)
        peaks, now = [], held
        for event in events:
            if event["name"] == self._MARK:
                peaks.append(now)
            else:
                now += event["args"]["Bytes"]
                peaks[-1:] = [max(now, *peaks[-1:])]
        return peaks


def _time(event: dict[str, Any]) -> float:
    return float(event["ts"])


class _CudaStatistics:
    """PyTorch's caching allocator on a card."""

    device, execution = "GPU:0", "eager"
    way = "PyTorch's caching allocator"

    def peaks(self, functions: Iterator[Callable[[], object]], held: int) -> list[int]:
        """Return the peak of each function."""
        import torch

        found = []
        for function in functions:
            torch.cuda.reset_peak_memory_stats()
            function()
            torch.cuda.synchronize()
            found.append(int(torch.cuda.max_memory_allocated()))
        return found


def _run(model: Any, step: SymbolicStep, mode: str, run: dict[str, Any], meter: _Meter) -> dict[str, Any]:
    """Take steps through Keras's own functions, on a batch that is held."""
    keras = import_keras()
    batch = keras.tree.map_structure(lambda spec: keras.ops.zeros(spec.shape, spec.dtype), step.data)
    inputs = sum(int(each.nbytes) for each in keras.tree.flatten(batch))
    take = {
        "train": lambda: model.train_on_batch(*batch),
        "evaluate": lambda: model.test_on_batch(*batch),
        "inference": lambda: model.predict_on_batch(*batch),
    }[mode]
    held = inputs + sum(variable_bytes(each) for group in step.variables.values() for each in group)
    seconds: list[float] = []

    def timed() -> None:
        begin = time.monotonic()
        take()
        seconds.append(time.monotonic() - begin)

    first, *peaks = meter.peaks(iter([timed] * (run["steps"] + 1)), held)
    return {
        "batch_size": run["batch_size"], "inputs": inputs, "before": held, "first": first, "peaks": peaks,
        "seconds": statistics.mean(seconds[1:] or seconds),
    }  # fmt: skip


if __name__ == "__main__":
    serve(work)
