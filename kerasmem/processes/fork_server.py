"""A process that has loaded TensorFlow and Keras, touched nothing of them, and forks itself for each call.

Loading TensorFlow takes seconds, a fork of a process that has loaded it milliseconds. TensorFlow starts its devices and
threads with its first operation, so a fork before it is a fresh process to it; this process never runs one.

Requests come over a socket: JSON, and the descriptors of four files, `call`, `answer`, standard output and standard
error, and of a pipe. Into the pipe go the number of the forked process, and at its end its exit status and the most
memory it had. When the socket is closed, all that was forked is ended.

The answer is a pickle that only the process that asked for it reads: a dictionary with `value`, or with `error`
(an exception, or None if it cannot be pickled), `class`, `message` and `traceback`; and with `device` and `peak`
(bytes) if they are known.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NoReturn

from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.errors import KerasmemError
from kerasmem.processes.children import end_group
from kerasmem.units import MIB

MOST_BYTES = 2**20  # of a request: folders and arguments, not the call
_FILES = 5


def serve(control: socket.socket) -> None:
    """Answer requests until the socket is closed."""
    _load(("tensorflow", "keras") if os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow" else ())
    forked: dict[int, tuple[int, int]] = {}  # the descriptor of a process -> its number, its pipe
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                selector.unregister(key.fileobj)
                _report(key.fd, *forked.pop(key.fd))
                continue
            request, files, _, _ = socket.recv_fds(control, MOST_BYTES, _FILES)
            if not request:
                for pid, _ in forked.values():
                    end_group(pid)
                return
            call, answer, out, err, pipe = files
            settings = json.loads(request)
            _load(settings["modules"])
            pid = os.fork()
            if pid == 0:
                selector.close()
                control.close()
                for descriptor, (_, other) in forked.items():
                    os.close(descriptor)
                    os.close(other)
                os.close(pipe)
                _become_the_child(settings, call, answer, out, err)
            with contextlib.suppress(OSError):  # the child does so too; whoever comes first
                os.setpgid(pid, pid)
            _write(pipe, {"pid": pid})
            for descriptor in (call, answer, out, err):
                os.close(descriptor)
            watched = os.pidfd_open(pid)
            forked[watched] = (pid, pipe)
            selector.register(watched, selectors.EVENT_READ)


def _load(modules: Iterable[str]) -> None:
    """Import modules, once for all calls."""
    missing = [name for name in modules if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(Exception):  # the call itself will say what is wrong
            importlib.import_module(name)
    if missing:
        gc.freeze()  # a collection in a fork need not copy every page of what was loaded here


def _become_the_child(settings: dict[str, Any], call: int, answer: int, out: int, err: int) -> NoReturn:
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="backslashreplace")
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
        with open(call, "rb") as request, open(answer, "wb") as result:
            _run(request, result, settings)
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)  # TensorFlow's own end may hang or crash after a failure


def _report(descriptor: int, pid: int, pipe: int) -> None:
    """Say how a process ended."""
    end_group(pid)  # what it has started itself, while its number still is its own
    _, status, used = os.wait4(pid, 0)
    os.close(descriptor)
    _write(pipe, {"code": os.waitstatus_to_exitcode(status), "host_peak": used.ru_maxrss * 1024})
    os.close(pipe)


def _write(pipe: int, report: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # nobody is listening any more
        os.write(pipe, json.dumps(report).encode() + b"\n")


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


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
