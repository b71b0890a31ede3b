"""Inside a fork of the server: set the limits, call the function, leave the answer in a file.

The answer is a pickle that only the process that asked for it reads: a dictionary with `value`, or with `error`
(an exception, or None if it cannot be pickled), `class`, `message` and `traceback`; and with `device` and `peak`
(bytes) if they are known.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.errors import KerasmemError
from kerasmem.units import MIB


def run(call: BinaryIO, answer: BinaryIO, settings: Mapping[str, Any]) -> None:
    """Make the call and write its outcome.

    Args:
        call: a pickle of (function, positional arguments, keyword arguments).
        answer: where to write.
        settings: `cwd`, `path`, `argv`, `environ`, and `device_bytes` or None.
    """
    os.chdir(settings["cwd"])
    os.environ.clear()
    os.environ.update(settings["environ"])
    sys.path[:] = settings["path"]
    sys.argv[:] = settings["argv"]
    random.seed()  # forks of one process would draw the same numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    try:
        prepare_devices(settings["device_bytes"])
        function, arguments, named = pickle.load(call)
        found = {"value": function(*arguments, **named)}
        found.update(_peak())
        pickled = _dumps_result(found)
    except BaseException as error:
        pickled = _dumps_error(error)
    answer.write(pickled)
    answer.flush()


def prepare_devices(device_bytes: int | None) -> None:
    """Make TensorFlow count its allocations and keep to a limit, before its devices start."""
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several processes may share a card
    if device_bytes is None:
        return
    import tensorflow as tf

    cards = tf.config.list_physical_devices("GPU")
    if not cards:
        os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(max(1, device_bytes // MIB))
    for card in cards:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=max(1, device_bytes // MIB))
        tf.config.set_logical_device_configuration(card, [limit])


def _peak() -> dict[str, Any]:
    """Return the device with the highest peak, and the peak, if TensorFlow has started its devices."""
    if not devices_are_started():
        return {}
    import tensorflow as tf

    for kind in ("GPU", "CPU"):
        peaks = {}
        for device in tf.config.list_logical_devices(kind):
            name = ":".join(device.name.split(":")[-2:])
            with contextlib.suppress(ValueError):
                peaks[name] = tf.config.experimental.get_memory_info(name)["peak"]
        if peaks:
            name = max(peaks, key=lambda name: peaks[name])
            return {"device": name, "peak": peaks[name]}
    return {}


def _dumps_result(found: dict[str, Any]) -> bytes:
    try:
        return _dumps(found)
    except Exception as error:
        raise KerasmemError(
            f"the result, a {type(found['value']).__name__}, cannot be sent back ({type(error).__name__}: {error}); "
            "return plain values, arrays, or a Keras model"
        ) from error


def _dumps(value: Any) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps(value))


def _dumps_error(error: BaseException) -> bytes:
    """Return the failure, with as much of the exception as can be sent."""
    failure: dict[str, Any] = {
        "class": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "error": None,
    }
    with contextlib.suppress(Exception):
        failure.update(_peak())
    with contextlib.suppress(Exception):
        pickled = _dumps({**failure, "error": error.with_traceback(None)})
        pickle.loads(pickled)  # some exceptions can be written and not be read
        return pickled
    return _dumps(failure)
