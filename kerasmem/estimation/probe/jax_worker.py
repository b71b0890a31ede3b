"""The child process where Keras runs on JAX: opens the model with real weights, runs real steps, reads memory.

Run by `kerasmem.processes.task.run_child`, never imported by the parent's process for its side effects.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kerasmem.devices.host import held_bytes, process_status
from kerasmem.errors import KerasmemError, ModelError
from kerasmem.estimation.compiled.on_jax import JaxStep, first_line, jax_step
from kerasmem.estimation.probe.worker import give_values
from kerasmem.models.backend import import_keras
from kerasmem.models.inputs import model_inputs
from kerasmem.models.request import ModelRequest, open_request
from kerasmem.models.sizes import variable_bytes
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
    import jax

    request = ModelRequest.from_dict(data["request"])
    with open_request(request) as opened:
        model = opened.model
        structure, inputs = model_inputs(model, request.input_shapes())
        training = with_replaced(opened.training, request.optimizer, request.loss, request.targets())
    give_values()
    device = jax.devices()[0]
    meter = _Resident() if device.platform == "cpu" else _Statistics(device)
    runs = []
    for run in data["runs"]:
        step = jax_step(model, training, structure, inputs, run["batch_size"], request.mode)
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
        "device": "CPU:0" if device.platform == "cpu" else "GPU:0",
        "execution": "xla",
        "weights": sum(map(variable_bytes, model.variables)),
        "optimizer": slots,
        "notes": list(step.notes),
        "runs": runs,
        "way": meter.way,
    }


class _Resident:
    """This process's resident memory: JAX counts nothing on a CPU."""

    way = "resident memory, since JAX counts nothing on a CPU"

    def peak(self, function: Callable[[], object]) -> int:
        """Return the most that was in use while a function ran: live arrays, and what came to be resident meanwhile.

        Raises:
            KerasmemError: the system does not let the process's peak be reset.
        """
        before = self.in_use()
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

    @staticmethod
    def in_use() -> int:
        """Return the bytes of all arrays."""
        import jax

        return sum(array.nbytes for array in jax.live_arrays())


class _Statistics:
    """The statistics of JAX's allocator on a card, whose peak is the process's: it cannot be reset."""

    way = "JAX's allocator, whose peak has the first step and its autotuning in it"

    def __init__(self, device: Any) -> None:
        self._device = device

    def peak(self, function: Callable[[], object]) -> int:
        """Return the most that was in use since the process began."""
        function()
        return int(self._device.memory_stats()["peak_bytes_in_use"])

    def in_use(self) -> int:
        """Return the bytes in use."""
        return int(self._device.memory_stats()["bytes_in_use"])


def _run(model: Any, step: JaxStep, mode: str, run: dict[str, Any], meter: Any) -> dict[str, Any]:
    """Take steps through Keras's own functions, which give the state up to each of them."""
    keras = import_keras()
    batch = keras.tree.map_structure(lambda spec: keras.ops.zeros(spec.shape, spec.dtype), step.data)
    inputs = sum(int(each.nbytes) for each in keras.tree.flatten(batch))
    take = {
        "train": lambda: model.train_on_batch(*batch),
        "evaluate": lambda: model.test_on_batch(*batch),
        "inference": lambda: model.predict_on_batch(*batch),
    }[mode]
    before = meter.in_use()
    first = meter.peak(take)
    peaks, seconds = [], []
    for _ in range(run["steps"]):
        begin = time.monotonic()
        peaks.append(meter.peak(take))
        seconds.append(time.monotonic() - begin)
    return {
        "batch_size": run["batch_size"], "inputs": inputs, "before": before, "first": first, "peaks": peaks,
        "seconds": statistics.mean(seconds),
    }  # fmt: skip


if __name__ == "__main__":
    serve(work)
