"""A process that has loaded TensorFlow and Keras, touched nothing of them, and forks itself for each call.

Loading TensorFlow takes seconds, a fork of a process that has loaded it milliseconds. TensorFlow starts its devices and
threads with its first operation, so a fork before it is a fresh process to it; this process never runs one.

Requests come over a socket: JSON, and the descriptors of four files, `call`, `answer`, standard output and standard
error, and of a pipe. Into the pipe go the number of the forked process, and at its end its exit status and the most
memory it had. When nobody reads the pipe any more, what was forked is ended with all that it has started.

The answer is a pickle that only the process that asked for it reads: a dictionary with `value`, or with `error`
(an exception) and `traceback`; and with `device` and `peak` (bytes) if they are known.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NoReturn

from cloudpickle import dumps

from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.errors import KerasmemError
from kerasmem.processes.children import die_with_parent, end_group
from kerasmem.units import MIB

_MOST_BYTES = 2**20  # of a request: folders and arguments, not the call
_FILES = 5
_BACKENDS = {"tensorflow": ("tensorflow", "keras"), "jax": ("jax", "keras")}  # modules that a backend needs


def serve(control: socket.socket) -> None:
    """Answer requests until the socket is closed."""
    _load(_BACKENDS.get(os.environ.get("KERAS_BACKEND", "tensorflow"), ()))
    while True:
        request, files, _, _ = socket.recv_fds(control, _MOST_BYTES, _FILES)
        if not request:
            return
        settings = json.loads(request)
        _load(settings["modules"])
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_the_child(settings, *files)
        with contextlib.suppress(OSError):  # the child does so too; whoever comes first
            os.setpgid(pid, pid)
        *others, reports = files
        for descriptor in others:
            os.close(descriptor)
        threading.Thread(target=_follow, args=(pid, reports)).start()


def _load(modules: Iterable[str]) -> None:
    """Import modules, once for all calls."""
    missing = [name for name in modules if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(Exception):  # the call itself will say what is wrong
            importlib.import_module(name)
    if missing:
        gc.freeze()  # a collection in a fork need not copy every page of what was loaded here


def _follow(pid: int, reports: int) -> None:
    """Wait for the end of a process or of its reader, and report how the process ended."""
    _write(reports, {"pid": pid})
    process = os.pidfd_open(pid)
    events = select.poll()
    events.register(process, select.POLLIN)
    events.register(reports, 0)  # reports POLLERR alone: the reading end is closed
    events.poll()
    end_group(pid)  # what it has started itself, while its number still is its own
    _, status, used = os.wait4(pid, 0)
    _write(reports, {"code": os.waitstatus_to_exitcode(status), "host_peak": used.ru_maxrss * 1024})
    os.close(process)
    os.close(reports)


def _write(reports: int, report: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # nobody is listening any more
        os.write(reports, json.dumps(report).encode() + b"\n")


def _become_the_child(settings: dict[str, Any], call: int, answer: int, out: int, err: int, reports: int) -> NoReturn:
    code = 1
    try:
        os.close(reports)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
            os.dup2(descriptor, number)
            os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False, errors="backslashreplace"))
        with open(call, "rb") as request, open(answer, "wb") as result:
            _run(request, result, settings)
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)  # TensorFlow's own end may hang or crash after a failure


def _run(call: BinaryIO, answer: BinaryIO, settings: Mapping[str, Any]) -> None:
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
        result = {"value": function(*arguments, **named)}
        result.update(_peak())
        pickled = _dumps_result(result)
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

    peaks = []
    for device in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"):
        name = ":".join(device.name.split(":")[-2:])
        with contextlib.suppress(ValueError):
            peaks.append((tf.config.experimental.get_memory_info(name)["peak"], name))
    return dict(zip(("peak", "device"), max(peaks), strict=True)) if peaks else {}


def _dumps_result(result: dict[str, Any]) -> bytes:
    try:
        return dumps(result)
    except Exception as error:
        raise KerasmemError(
            f"the result, a {type(result['value']).__name__}, cannot be sent back ({type(error).__name__}: {error}); "
            "return plain values, arrays, or a Keras model"
        ) from error


def _dumps_error(error: BaseException) -> bytes:
    """Return the failure. An exception that cannot be sent is described by a `KerasmemError`."""
    failure: dict[str, Any] = {"traceback": traceback.format_exc()}
    with contextlib.suppress(Exception):
        failure.update(_peak())
    with contextlib.suppress(Exception):
        pickled = dumps({**failure, "error": error.with_traceback(None)})
        if isinstance(pickle.loads(pickled)["error"], Exception):  # and not SystemExit, which would end the asker
            return pickled
    return dumps({**failure, "error": KerasmemError(f"the function raised {type(error).__name__}: {error}")})


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
