"""Run real steps on TensorFlow and read its allocator."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kerasmem.compat.keras_layers import supports_jit
from kerasmem.errors import ModelError
from kerasmem.estimation.probe.session import Session, give_values
from kerasmem.models.backend import keras_reason
from kerasmem.models.own_step import loop_is_compiled, optimizer_variables, optimizers_of
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import PreparedStep, prepare_step


class StepRanOutError(ModelError):
    """A step ran out of the device's memory."""


class TensorFlowSession(Session):
    """Steps through the functions that Keras makes for `fit`, `evaluate` and `predict`."""

    def __init__(self, request: StepSpec) -> None:
        import tensorflow as tf

        super().__init__(request)
        self.device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
        self.jit_compile = False
        self.prepared: PreparedStep | None = None
        self.tensors: Any = None
        self.function: Callable[[Any], Any] | None = None

    def prepare(self, batch_size: int, mode: str) -> int:
        """Make the step and a batch of zeros; return the batch's bytes."""
        import tensorflow as tf

        model, known = self.model, self.prepared
        if known is None:
            self.jit_compile = self._is_compiled()
        self.prepared = prepare_step(
            model, self.training, self.structure, self.inputs, batch_size, mode, self.jit_compile, known
        )
        self.notes = tuple(self.prepared.notes)
        if known is None:
            give_values(self.model)
        # A new function for each batch size: the last one would be traced again, for any batch size.
        kind = {"inference": "predict", "evaluate": "test"}.get(mode, "train")
        if kind == "predict":
            if model.run_eagerly is None or not model.compiled:
                model.run_eagerly = False
            model.jit_compile = self.jit_compile
        getattr(model, f"make_{kind}_function")(force=True)
        function = getattr(model, f"{kind}_function")
        self.function = lambda batch: function([batch] if kind == "predict" else iter([batch]))
        self.tensors = tf.nest.map_structure(_filled, self.prepared.data)
        return sum(_tensor_bytes(tensor) for tensor in tf.nest.flatten(self.tensors) if tf.is_tensor(tensor))

    def _is_compiled(self) -> bool:
        """Return whether XLA compiles the step."""
        wanted = self.request.jit_compile
        if wanted != "auto":
            return bool(wanted)
        compiles = loop_is_compiled(self.model)
        return bool(self.device != "CPU:0" and supports_jit(self.model) if compiles is None else compiles)

    def bytes_in_use(self) -> int:
        """Return the bytes in use between steps."""
        return int(self._memory()["current"])

    def step(self) -> int:
        """Run one step and return its peak in use, in bytes."""
        import tensorflow as tf

        assert self.function is not None
        tf.config.experimental.reset_memory_stats(self.device)
        outputs = self.function(self.tensors)
        for tensor in tf.nest.flatten(outputs):
            if hasattr(tensor, "numpy"):
                tensor.numpy()  # waits for the device
        del outputs
        return int(self._memory()["peak"])

    def facts(self) -> dict[str, Any]:
        """Return the fields of `MeasuredSteps` that hold for all runs."""
        is_training = self.request.mode == "train" and bool(optimizers_of(self.model))
        slots = sum(_tensor_bytes(variable.value) for variable in optimizer_variables(self.model))
        return {
            "device": self.device,
            "execution": "xla" if self.jit_compile else "graph",
            "weights": sum(_tensor_bytes(variable.value) for variable in self.model.variables),
            "optimizer": slots if is_training else None,
            "notes": list(self.notes),
        }

    def failure(self, error: Exception, batch_size: int) -> ModelError:
        """Return an error of the model's code, or of the allocator, as a message."""
        import tensorflow as tf

        if not isinstance(error, tf.errors.ResourceExhaustedError):
            return super().failure(error, batch_size)
        limit = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB")
        within = f" within its limit of {limit} MiB" if limit and self.device.startswith("CPU") else ""
        return StepRanOutError(
            f"model {self.model.name!r} at batch size {batch_size} ran out of memory on {self.device}{within} "
            f"({out_of_memory_line(error)}); take a smaller batch"
        )

    def _memory(self) -> Any:
        import tensorflow as tf

        return tf.config.experimental.get_memory_info(self.device)


def _filled(spec: Any) -> Any:
    """Return a tensor of zeros, made the same way whatever its size. Numbers stay as they are."""
    import tensorflow as tf

    if not hasattr(spec, "shape"):
        return spec
    return tf.fill(spec.shape, tf.constant("" if spec.dtype == "string" else 0, spec.dtype))


def _tensor_bytes(tensor: Any) -> int:
    return int((tensor.dtype.size or 0) * tensor.shape.num_elements())


def out_of_memory_line(error: BaseException) -> str:
    """Return the line of TensorFlow's message that names the allocation."""
    lines = (line.strip() for line in str(error).splitlines())
    matching = (line[:300] for line in lines if "OOM when" in line or "ut of memory" in line)
    return next(matching, keras_reason(error))
