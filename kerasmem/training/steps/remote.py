"""Steps in a separate process, while data and callbacks stay in this one.

The process runs `python -m kerasmem.training.steps.remote`, and builds the model from its configuration.
"""

from __future__ import annotations

import os
import pickle
import traceback
from typing import Any

import cloudpickle
import keras
import tensorflow as tf

from kerasmem.compat.tensorflow_runtime import devices_are_started, operations_are_deterministic
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.diagnosis.explaining import explain_stream
from kerasmem.errors import ModelError, UsageError
from kerasmem.hdf5.format.layout import one_line
from kerasmem.models.opening import pack_model
from kerasmem.processes.channel import ChannelChild, ChildEnded, serve_requests
from kerasmem.processes.children import exit_reason
from kerasmem.training.run_state import ModelState, read_state
from kerasmem.training.steps.batches import map_arrays, on_host
from kerasmem.training.steps.engine import LocalEngine, RanOut, build_step

_WORKER = "KERASMEM_FIT_WORKER"  # environment variable of the separate process
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_TAIL = 2**16  # bytes of the dead process's messages that are read


class RemoteEngine:
    """Runs steps in a separate process, and starts a new one after a crash.

    Args:
        model: compiled; in this process it changes only by `load_state`.
        batch: the first batch, to create all variables.
        any_rows: as for `LocalEngine`.
    """

    def __init__(self, model: Any, batch: Any, *, any_rows: bool = False) -> None:
        check_card()
        self._batch, self._any_rows = on_host(batch), any_rows
        self._packed = pack(model)
        self._child: ChannelChild | None = None
        self.load(read_state(model))

    @property
    def pid(self) -> int | None:
        """Number of the separate process."""
        return None if self._child is None else self._child.pid

    def step(self, kind: str, batch: Any, size: int) -> dict[str, Any]:
        """Train ("train") or evaluate ("test") a batch in pieces of up to `size` rows."""
        logs: dict[str, Any] = self._ask("step", kind, on_host(batch), size)
        return logs

    def state(self) -> ModelState:
        """Return a copy of the variables that steps change."""
        state: ModelState = self._ask("state")
        return state

    def load(self, state: ModelState) -> None:
        """Restore a copy, in a new process if the old one is gone."""
        if self._child is None:
            self._start(state)
        else:
            self._ask("load", state)

    def reset_metrics(self) -> None:
        """Reset the metrics."""
        self._ask("reset_metrics")

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self._ask("set_rate", rate)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _start(self, state: ModelState) -> None:
        self._child = ChannelChild("kerasmem.training.steps.remote", **{_GROWTH: "true", _WORKER: "1"})
        try:
            self._ask("make", self._packed, self._batch, self._any_rows)
            self._ask("load", state)
        except ModelError as error:
            self.close()
            raise cannot_be_made(str(error)) from None

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self._child is None:
            raise RanOut(_unknown_failure("the training process is not running"), is_certain=False, is_dead=True)
        try:
            kind, value = self._child.ask((name, arguments))
        except ChildEnded as end:
            self._child = None
            raise _death(end) from None
        except BaseException:  # Ctrl-C has ended the process
            self._child = None
            raise
        if kind == "ran out":
            data, is_dead, is_update = value
            if is_dead:
                self.close()
            raise RanOut(Diagnosis.from_dict(data), is_dead=is_dead, is_update=is_update)
        if kind == "failed":
            raise ModelError(f"the step failed in the training process: {value}")
        return value


Engine = LocalEngine | RemoteEngine  # `LocalEngine` documents the methods


def _death(end: ChildEnded) -> RanOut:
    """Return the failure from the exit code and the messages of the process."""
    with end.messages as messages:
        messages.seek(max(0, messages.seek(0, os.SEEK_END) - _TAIL))
        diagnosis = explain_stream(messages, name="its messages")
    if diagnosis.out_of_memory:
        return RanOut(diagnosis, is_dead=True)
    summary = f"the training process was ended by {exit_reason(end.code)}"
    return RanOut(_unknown_failure(summary), is_certain=False, is_dead=True)


def check_card() -> None:
    """Refuse to start a process if this one has reserved all memory of a card.

    Raises:
        UsageError: If it has.
    """
    if not devices_are_started():
        return
    for card in tf.config.list_logical_devices("GPU")[:1]:
        physical = tf.config.list_physical_devices("GPU")[0]
        limited = tf.config.get_logical_device_configuration(physical)
        grows = tf.config.experimental.get_memory_growth(physical) or os.environ.get(_GROWTH, "").lower() == "true"
        if not grows and not (limited and limited[0].memory_limit):
            raise UsageError(
                f"isolated: this process has reserved all memory of {card.name}; call "
                "kerasmem.enable_memory_growth() before TensorFlow starts"
            )


def _unknown_failure(summary: str) -> Diagnosis:
    return Diagnosis(True, family="host", summary=summary, cause="unknown")


def pack(model: Any) -> dict[str, Any]:
    """Return the argument of `unpack`, without weights.

    Raises:
        UsageError: If the model cannot be described; the message has the fix.
    """
    try:
        copy = cloudpickle.dumps(pack_model(model))  # classes of a script or notebook by value, others by name
    except Exception as error:
        raise cannot_be_made(str(error)) from error
    return {
        "copy": copy,
        "floatx": keras.config.floatx(),
        "dtype_policy": keras.dtype_policies.serialize(model.dtype_policy),  # decides on loss scaling
        "image_data_format": keras.config.image_data_format(),
        "deterministic": operations_are_deterministic(),
        "run_eagerly": bool(model.run_eagerly),
        "jit_compile": bool(model.jit_compile),
    }


def cannot_be_made(reason: str) -> UsageError:
    """Return the error if the separate process cannot build the model."""
    return UsageError(
        f"model cannot be built from its configuration in another process ({one_line(reason, 300)}); implement "
        "get_config(), or compile with jit_compile=False and isolated=False"
    )


def unpack(packed: dict[str, Any]) -> Any:
    """Return the compiled model with new weights, in the separate process."""
    if packed["deterministic"]:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_floatx(packed["floatx"])
    keras.config.set_dtype_policy(keras.dtype_policies.deserialize(packed["dtype_policy"]))
    keras.config.set_image_data_format(packed["image_data_format"])
    copy = pickle.loads(packed["copy"])  # sent by the parent
    model = copy.built()
    if model.built:
        model.optimizer.build(model.trainable_variables)
    model.run_eagerly = packed["run_eagerly"]
    model.jit_compile = packed["jit_compile"]
    return model


def refuse_in_worker() -> None:
    """Refuse to train in the separate process, which imports modules only for their classes.

    Raises:
        UsageError: If this is the separate process.
    """
    if os.environ.get(_WORKER):
        raise UsageError(
            "fit: the training process imported the module that calls fit; put the call under "
            '`if __name__ == "__main__":`'
        )


def main() -> None:
    """Answer requests of a `RemoteEngine`, which are names of methods with arguments."""
    engine: LocalEngine | None = None

    def make(packed: dict[str, Any], batch: Any, any_rows: bool) -> None:
        nonlocal engine
        model = unpack(packed)
        build_step(model, _tensors(batch))
        engine = LocalEngine(model, any_rows=any_rows)

    def answer(request: tuple[str, tuple[Any, ...]]) -> tuple[Any, bool]:
        name, arguments = request
        try:
            if name == "make":
                make(*arguments)
                return ("done", None), True
            if name != "step":
                return ("done", getattr(engine, name)(*arguments)), True
            kind, batch, size = arguments
            assert engine is not None
            logs = engine.step(kind, _tensors(batch), size)
            return ("done", keras.tree.map_structure(keras.ops.convert_to_numpy, logs)), True
        except RanOut as failure:
            return ("ran out", (failure.diagnosis.to_dict(), failure.is_dead, failure.is_update)), not failure.is_dead
        except Exception as error:
            traceback.print_exc()
            return ("failed", f"{type(error).__name__}: {error}"), True

    # After a failed XLA step no buffer may be touched, not even freed; so `serve_requests` ends with `os._exit`.
    serve_requests(answer)


def _tensors(batch: Any) -> Any:
    with tf.device("CPU:0"):
        return map_arrays(tf.convert_to_tensor, batch)


if __name__ == "__main__":
    main()
