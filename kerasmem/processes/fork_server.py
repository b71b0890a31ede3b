"""A process that imports TensorFlow and Keras once, and forks itself for each call.

Importing TensorFlow takes seconds, forking a process that has imported it milliseconds. TensorFlow starts its devices
and threads with its first operation, and this process never runs one, so its forks behave like fresh processes.

A request carries the descriptors of four files (`call`, `answer`, standard output and standard error) and of a socket.
The server sends the process ID of the fork over this socket, and finally its exit status and peak memory. When the
client closes its end, the fork and its children are killed.

The call is two pickles: the settings (`cwd`, `path`, `argv`, `environ`, `device_bytes`), then the function, its
positional and its keyword arguments. The answer is a pickled dictionary, read only by the process that made the call:
`value`, or `error` (an exception) and `traceback`; and `device` and `peak` (bytes) if known.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any, BinaryIO, NoReturn

from cloudpickle import dumps

from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.errors import KerasmemError
from kerasmem.processes.children import die_with_parent, end_group
from kerasmem.units import MIB


def serve(control: socket.socket) -> None:
    """Answer requests until the socket is closed."""
    for module in (os.environ.get("KERAS_BACKEND", "tensorflow"), "keras"):
        with contextlib.suppress(Exception):  # the call itself reports the error
            importlib.import_module(module)
    gc.freeze()  # so that garbage collection in a fork does not copy the imported modules' pages
    while True:
        request, files, _, _ = socket.recv_fds(control, 16, 5)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_the_child(*files)
        with contextlib.suppress(OSError):  # the fork has ended
            os.setpgid(pid, pid)
        *others, report = files
        for descriptor in others:
            os.close(descriptor)
        threading.Thread(target=_follow, args=(pid, report)).start()


def _follow(pid: int, descriptor: int) -> None:
    """Wait until a fork ends or its client leaves, and report how the fork ended."""
    process = os.pidfd_open(pid)
    with socket.socket(fileno=descriptor) as report, contextlib.suppress(OSError):  # the client has left
        try:
            report.send(b"%d" % pid)
            select.select([process, report.fileno()], [], [])  # the socket is readable once its other end is closed
        finally:
            end_group(pid)  # kills its children too, before the process ID is reused
            _, status, used = os.wait4(pid, 0)
            os.close(process)
        report.send(b"%d %d" % (os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024))


def _become_the_child(call: int, answer: int, out: int, err: int, report: int) -> NoReturn:
    code = 1
    try:
        os.close(report)
        die_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
            os.dup2(descriptor, number)
            os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False, errors="backslashreplace"))
        with open(call, "rb") as request, open(answer, "wb") as result:
            try:
                pickled = _run(request)
            except BaseException as error:
                pickled = _dumps_error(error)
            result.write(pickled)
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)  # TensorFlow may hang or crash at a regular exit after a failure


def _run(call: BinaryIO) -> bytes:
    """Make the call. Return the pickled answer."""
    import numpy as np

    settings = pickle.load(call)
    os.chdir(settings["cwd"])
    os.environ.clear()
    os.environ.update(settings["environ"])
    sys.path[:] = settings["path"].split(os.pathsep)
    sys.argv[:] = settings["argv"]
    np.random.seed()  # otherwise all forks would draw the same numbers
    prepare_devices(settings["device_bytes"])
    function, arguments, named = pickle.load(call)
    value = function(*arguments, **named)
    try:
        return dumps({"value": value, **_peak()})
    except Exception as error:
        raise KerasmemError(
            f"the result, a {type(value).__name__}, cannot be sent back ({type(error).__name__}: {error}); "
            "return plain values, arrays, or a Keras model"
        ) from error


def prepare_devices(device_bytes: int | None) -> None:
    """Make TensorFlow count its allocations and limit its memory. Call it before its devices start."""
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several processes may share a GPU
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
    """Return the highest peak and its device, or nothing if TensorFlow has not started its devices."""
    if not devices_are_started():
        return {}
    import tensorflow as tf

    peaks = []
    for device in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"):
        name = ":".join(device.name.split(":")[-2:])
        with contextlib.suppress(ValueError):
            peaks.append((tf.config.experimental.get_memory_info(name)["peak"], name))
    return dict(zip(("peak", "device"), max(peaks), strict=True)) if peaks else {}


def _dumps_error(error: BaseException) -> bytes:
    """Return the pickled error. An exception that cannot be pickled becomes a `KerasmemError`."""
    failure: dict[str, Any] = {"traceback": traceback.format_exc()}
    with contextlib.suppress(Exception):
        failure.update(_peak())
    with contextlib.suppress(Exception):
        pickled = dumps({**failure, "error": error.with_traceback(None)})
        if isinstance(pickle.loads(pickled)["error"], Exception):  # SystemExit would end the calling process
            return pickled
    return dumps({**failure, "error": KerasmemError(f"the function raised {type(error).__name__}: {error}")})


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
