"""One model with real weights, trained at one batch size after another; the backends differ in how a step runs."""

from __future__ import annotations

import gc
import time
from typing import Any

from kerasmem.compat.keras_variables import give_value, index_variables
from kerasmem.errors import KerasmemError, ModelError
from kerasmem.models.backend import keras_reason
from kerasmem.models.inputs import model_inputs
from kerasmem.models.own_step import optimizers_of
from kerasmem.models.spec import StepSpec
from kerasmem.models.training import with_replaced
from kerasmem.models.weightless import shaped_variables


class Session:
    """A model with real weights.

    Args:
        request: the model and how it is trained.

    Attributes:
        device: "CPU:0" or "GPU:0".
        way: how memory is read, if not through TensorFlow's allocator.
        notes: assumptions about the training, known after the first run.
    """

    device = "CPU:0"
    way: str | None = None
    notes: tuple[str, ...] = ()

    def __init__(self, request: StepSpec) -> None:
        self.request = request
        with request.opened() as opened:
            self.model = opened.model
            self.structure, self.inputs = model_inputs(opened.model, request.input_shapes())
            self.training = with_replaced(opened.training, request.optimizer, request.loss, request.targets())
        give_values(self.model)

    def prepare(self, batch_size: int, mode: str) -> int:
        """Make the step and a batch of zeros; return the batch's bytes."""
        raise NotImplementedError

    def bytes_in_use(self) -> int:
        """Return the bytes in use between steps."""
        raise NotImplementedError

    def step(self) -> int:
        """Run one step and return its peak in use, in bytes."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return the fields of `MeasuredSteps` that hold for all runs."""
        raise NotImplementedError

    def run(self, batch_size: int, steps: int, seconds: float | None, mode: str | None = None) -> dict[str, Any]:
        """Run some steps at one batch size, as fields of a `Run`.

        Args:
            batch_size: samples.
            steps: after the first one, which also sets things up.
            seconds: no further step begins after these, once two are done.
            mode: "train", "evaluate" or "inference". Defaults to the request's.

        Raises:
            ModelError: If the model's code fails, or memory runs out.
        """
        try:
            inputs = self.prepare(batch_size, mode or self.request.mode)
            before = self.bytes_in_use()
            first = self.step()
            peaks: list[int] = []
            begin = time.monotonic()
            while len(peaks) < steps:
                peaks.append(self.step())
                if seconds is not None and len(peaks) >= 2 and time.monotonic() - begin > seconds:
                    break
            took = (time.monotonic() - begin) / max(len(peaks), 1)
        except (KerasmemError, MemoryError):
            raise
        except Exception as error:  # the model's own code runs in a step, and may raise anything
            raise self.failure(error, batch_size) from error
        return {
            "batch_size": batch_size,
            "inputs": inputs,
            "before": before,
            "first": first,
            "peaks": peaks,
            "seconds": took,
        }

    def failure(self, error: Exception, batch_size: int) -> ModelError:
        """Return an error of the model's code as a message."""
        return ModelError(
            f"a step of model {self.model.name!r} at batch size {batch_size} failed: "
            f"{type(error).__name__}: {keras_reason(error)}"
        )


def give_values(model: Any) -> None:
    """Initialise every variable that was made without a value, wherever it is held."""
    gc.collect()  # else garbage of the code that built the model would take memory now
    for variable in shaped_variables():
        give_value(variable)
    for optimizer in optimizers_of(model):
        index_variables(optimizer)
