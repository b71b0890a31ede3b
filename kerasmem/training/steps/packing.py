"""A compiled model as data from which another process makes the same: its configuration, and where its classes are."""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.compat.tensorflow_runtime import operations_are_deterministic
from kerasmem.errors import UsageError

WORKER = "KERASMEM_FIT_WORKER"  # set in the environment of a process that takes steps for another


def pack(model: Any) -> dict[str, Any]:
    """Return what `unpack` needs, without weights.

    Raises:
        UsageError: the model cannot be described; the message has the way out.
    """
    import keras

    try:
        config = keras.saving.serialize_keras_object(model)
    except Exception as error:
        raise UsageError(
            f"model: it cannot be made once more in another process ({type(error).__name__}: {error}); give "
            "its class get_config(), compile with jit_compile=False and isolated=False, or use `kerasmem run`"
        ) from error
    found = dict(_own_objects(model))
    try:
        objects = pickle.dumps(found)
    except Exception as error:
        raise UsageError(
            f"model: what it is made of cannot be named to another process ({error}); define classes and functions at "
            "the top of a module, or use `kerasmem run`"
        ) from error
    return {
        "config": config,
        "objects": objects,
        "main": _main_file() if any(each.__module__ == "__main__" for each in found.values()) else None,
        "floatx": keras.config.floatx(),
        "image_data_format": keras.config.image_data_format(),
        "deterministic": operations_are_deterministic(),
        "run_eagerly": bool(model.run_eagerly),
        "jit_compile": bool(model.jit_compile),
    }


def unpack(packed: dict[str, Any]) -> Any:
    """Return the model, compiled, with newly drawn weights. In the other process."""
    import keras
    import tensorflow as tf

    if packed["deterministic"]:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_floatx(packed["floatx"])
    keras.config.set_image_data_format(packed["image_data_format"])
    if packed["main"] is not None:
        _import_main(packed["main"])
    objects = pickle.loads(packed["objects"])  # from our own parent
    model = keras.saving.deserialize_keras_object(packed["config"], custom_objects=objects, safe_mode=False)
    model.run_eagerly = packed["run_eagerly"]
    model.jit_compile = packed["jit_compile"]
    return model


def _own_objects(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the classes and functions that are not Keras's, by the names under which Keras looks for them."""
    import keras

    yield from keras.saving.get_custom_objects().items()
    metrics = [inner for each in model.metrics for inner in (each, *getattr(each, "metrics", ()))]
    parts = [model, model.optimizer, *flatten_layers(model), *metrics, *keras.tree.flatten(model.loss)]
    for part in list(parts):
        parts += [each for each in getattr(part, "__dict__", {}).values() if _is_candidate(each)]
    for part in parts:
        thing = part if isinstance(part, (types.FunctionType, type)) else type(part)
        module = getattr(thing, "__module__", None) or ""
        if module.partition(".")[0] in ("keras", "builtins", "tensorflow", "numpy") or thing.__name__ == "<lambda>":
            continue  # Keras writes a lambda down itself
        yield thing.__name__, thing


def _is_candidate(value: Any) -> bool:
    return isinstance(value, types.FunctionType) or hasattr(value, "get_config")


def _main_file() -> str:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None:
        raise UsageError(
            "model: its classes are defined in a notebook or console, which another process cannot import; put them "
            "into a module, or compile with jit_compile=False and give isolated=False"
        )
    return os.path.abspath(path)


def _import_main(path: str) -> None:
    """Run the parent's script as a module, as `multiprocessing` does, for the classes that it defines."""
    import runpy

    module = types.ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def refuse_in_worker() -> None:
    """Refuse to train in a process that was only to import the script for its classes.

    Raises:
        UsageError: we are in one.
    """
    if os.environ.get(WORKER):
        raise UsageError(
            "fit: the script was imported by the process that takes its steps, for the classes it defines; begin the "
            'part that trains with `if __name__ == "__main__":`, put the classes into a module, or use `kerasmem run`'
        )
