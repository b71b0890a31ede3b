"""The child process where Keras runs on JAX: real weights, real steps, and what memory they take.

Run by `kerasmem.processes.task.run_child`, never imported by the parent's process for its side effects.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kerasmem.devices.host import held_bytes, process_status
from kerasmem.errors import KerasmemError, ModelError, first_line
from kerasmem.estimation.probe.worker import give_values
from kerasmem.models.backend import import_keras
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
    request = ModelRequest.from_dict(data["request"])
    with open_request(request) as opened:
        model = opened.model
        structure, inputs = model_inputs(model, request.input_shapes())
        training = with_replaced(opened.training, request.optimizer, request.loss, request.targets())
    give_values()
    device, way, peak = _meter()
    runs = []
    for run in data["runs"]:
        step = symbolic_step(model, training, structure, inputs, run["batch_size"], request.mode)
        give_values()
        try:
            runs.append(_run(model, step, request.mode, run, peak))
        except (KerasmemError, MemoryError):
            raise
        except Exception as error:
            what = f"a step of model {model.name!r} at batch size {run['batch_size']}"
            raise ModelError(f"{what} failed: {type(error).__name__}: {first_line(error)}") from error
    slots = sum(map(variable_bytes, model.optimizer.variables)) if request.mode == "train" else None
    return {
        "device": device,
        "execution": "xla",
        "weights": sum(map(variable_bytes, model.variables)),
        "optimizer": slots,
        "notes": list(step.notes),
        "runs": runs,
        "way": way,
    }


Peak = Callable[[Callable[[], object]], int]  # runs a function and returns the peak in bytes


def _meter() -> tuple[str, str, Peak]:
    """Return the device, the way its memory is read (for notes), and the function that reads the peak of a step."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return "CPU:0", "resident memory, since JAX counts nothing on a CPU", _resident_peak

    def peak(function: Callable[[], object]) -> int:
        function()
        return int(device.memory_stats()["peak_bytes_in_use"])

    # The peak is the process's: it cannot be reset.
    return "GPU:0", "JAX's allocator, whose peak has the first step and its autotuning in it", peak


def _resident_peak(function: Callable[[], object]) -> int:
    """Return the bytes of live arrays before a function, and those that became resident while it ran.

    Raises:
        KerasmemError: If the system does not reset the process's peak.
    """
    import jax

    before = sum(array.nbytes for array in jax.live_arrays())
    _settle()
    try:
        (_PROCESS / "clear_refs").write_text("5")  # the peak begins from what is resident now
    except OSError as error:
        raise KerasmemError(f"the system does not reset this process's peak ({error}): measure needs it") from error
    resident = process_status(_PROCESS)["VmHWM"]
    function()
    return before + process_status(_PROCESS)["VmHWM"] - resident


def _settle() -> None:
    """Wait until threads have freed the buffers of the last step, and give free heap back.

    A step's results are available before its buffers are freed.
    """
    last, now, end = -1, held_bytes(), time.monotonic() + _PATIENCE
    while now != last and time.monotonic() < end:
        time.sleep(_PAUSE)
        last, now = now, held_bytes()


def _run(model: Any, step: SymbolicStep, mode: str, run: dict[str, Any], peak: Peak) -> dict[str, Any]:
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

    first, *peaks = [peak(timed) for _ in range(run["steps"] + 1)]
    return {
        "batch_size": run["batch_size"], "inputs": inputs, "before": held, "first": first, "peaks": peaks,
        "seconds": statistics.mean(seconds[1:] or seconds),
    }  # fmt: skip


if __name__ == "__main__":
    serve(work)
