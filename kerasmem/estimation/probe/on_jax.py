"""Real steps on JAX: its allocator's peak on a GPU, resident memory on a CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kerasmem.devices.host import held_bytes, process_status
from kerasmem.errors import KerasmemError
from kerasmem.estimation.compiled.on_jax import batch_of, state_of
from kerasmem.estimation.probe.session import Session, give_values
from kerasmem.models.backend import import_keras
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import prepare_step

_PROCESS = Path("/proc/self")
_PAUSE, _PATIENCE = 0.02, 2.0  # seconds


class JaxSession(Session):
    """Steps through Keras's `train_on_batch`, `test_on_batch` and `predict_on_batch`."""

    def __init__(self, request: StepSpec) -> None:
        import jax

        super().__init__(request)
        self._jax_device = jax.devices()[0]
        if self._jax_device.platform == "cpu":
            self.way = "resident memory, since JAX counts nothing on a CPU"
        else:
            self.device = "GPU:0"
            self.way = "JAX's allocator, whose peak has the first step and its autotuning in it"

    def prepare(self, batch_size: int, mode: str) -> int:
        """Make the step and a batch of zeros; return the batch's bytes."""
        keras, model = import_keras(), self.model
        step = prepare_step(model, self.training, self.structure, self.inputs, batch_size, mode, jit_compile=True)
        give_values(self.model)
        self.notes = step.notes
        batch = keras.tree.map_structure(lambda spec: keras.ops.zeros(spec.shape, spec.dtype), batch_of(step))
        name = {"train": "train_on_batch", "evaluate": "test_on_batch", "inference": "predict_on_batch"}[mode]
        self._take = lambda: getattr(model, name)(*batch)
        inputs = sum(int(tensor.nbytes) for tensor in keras.tree.flatten(batch))
        self._held = inputs + sum(variable_bytes(each) for group in state_of(step).values() for each in group)
        return inputs

    def bytes_in_use(self) -> int:
        """Return the bytes of the step's state and batch."""
        return self._held

    def step(self) -> int:
        """Run one step and return its peak in bytes."""
        if self.device == "CPU:0":
            return self._resident_peak()
        self._take()
        return int(self._jax_device.memory_stats()["peak_bytes_in_use"])  # the process's: it cannot be reset

    def _resident_peak(self) -> int:
        """Return the bytes of live arrays before a step, and those that became resident during it.

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
        self._take()
        return before + process_status(_PROCESS)["VmHWM"] - resident

    def facts(self) -> dict[str, Any]:
        """Return the fields of `MeasuredSteps` that hold for all runs."""
        is_training = self.request.mode == "train"
        return {
            "device": self.device,
            "execution": "xla",
            "weights": sum(map(variable_bytes, self.model.variables)),
            "optimizer": sum(map(variable_bytes, self.model.optimizer.variables)) if is_training else None,
            "notes": list(self.notes),
            "way": self.way,
        }


def _settle() -> None:
    """Wait until threads have freed the buffers of the last step, and give free heap back.

    A step's results are available before its buffers are freed.
    """
    last, now, end = -1, held_bytes(), time.monotonic() + _PATIENCE
    while now != last and time.monotonic() < end:
        time.sleep(_PAUSE)
        last, now = now, held_bytes()
