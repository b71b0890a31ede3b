"""A compiled model as data for another process: its configuration and its classes."""

from __future__ import annotations

import os
import pickle
from typing import Any

import cloudpickle
import keras
import tensorflow as tf

from kerasmem.compat.tensorflow_runtime import operations_are_deterministic
from kerasmem.errors import UsageError
from kerasmem.hdf5.layout import one_line
from kerasmem.models.vocabulary import configuration, own_objects, register_own_classes

WORKER = "KERASMEM_FIT_WORKER"  # set in the environment of a process that takes steps for another


def pack(model: Any) -> dict[str, Any]:
    """Return the argument of `unpack`, without weights.

    Raises:
        UsageError: the model cannot be described; the message has the way out.
    """
    try:
        config = configuration(model)
    except Exception as error:
        raise cannot_be_made(f"{type(error).__name__}: {error}") from error
    try:
        objects = cloudpickle.dumps(own_objects(model))  # those of a script or notebook as they are, others by name
    except Exception as error:
        raise UsageError(
            f"model: it cannot be sent to another process ({error}); define its classes and functions in a module"
        ) from error
    return {
        "config": config,
        "objects": objects,
        "floatx": keras.config.floatx(),
        "dtype_policy": keras.dtype_policies.serialize(model.dtype_policy),  # it decides whether losses are scaled
        "image_data_format": keras.config.image_data_format(),
        "deterministic": operations_are_deterministic(),
        "run_eagerly": bool(model.run_eagerly),
        "jit_compile": bool(model.jit_compile),
    }


def cannot_be_made(reason: str) -> UsageError:
    """Return the error if another process cannot make the model."""
    return UsageError(
        f"model: another process cannot make it from its configuration ({one_line(reason, 300)}); implement "
        "get_config(), or compile with jit_compile=False and isolated=False"
    )


def unpack(packed: dict[str, Any]) -> Any:
    """Return the model, compiled, with newly drawn weights. In the other process."""
    if packed["deterministic"]:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_floatx(packed["floatx"])
    keras.config.set_dtype_policy(keras.dtype_policies.deserialize(packed["dtype_policy"]))
    keras.config.set_image_data_format(packed["image_data_format"])
    objects = pickle.loads(packed["objects"])  # from our own parent
    register_own_classes(packed["config"])
    model = keras.saving.deserialize_keras_object(packed["config"], custom_objects=objects, safe_mode=False)
    model.run_eagerly = packed["run_eagerly"]
    model.jit_compile = packed["jit_compile"]
    return model


def refuse_in_worker() -> None:
    """Refuse to train in a process that imports a module only for the classes in it.

    Raises:
        UsageError: we are in one.
    """
    if os.environ.get(WORKER):
        raise UsageError(
            "fit: the module that calls it was imported by the process that takes its steps, for classes it defines; "
            'begin the part that trains with `if __name__ == "__main__":`, or put the classes into a '
            "module of their own"
        )
