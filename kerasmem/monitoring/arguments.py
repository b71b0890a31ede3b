"""The arguments of `MemoryLogger`, checked when it is made rather than when training has begun."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from numbers import Integral, Real

from kerasmem.devices.nvml import Nvml
from kerasmem.errors import UsageError

_DEVICE_NAME = re.compile(r"[A-Za-z_]+:\d+\Z")


def check_arguments(
    filename: object, every: object, nvml: object, verbose: object, devices: object, keep: object,
    board: object = None, sampling: object = 20.0,
) -> None:  # fmt: skip
    """Raise UsageError for an argument that cannot be right."""
    if filename is not None:
        _check_path("filename", filename)
        if os.path.isdir(filename):  # type: ignore[arg-type]
            raise UsageError(f"filename: {_text(filename)!r} is a folder; name a file in it, such as memory.csv")
    if board is not None:
        _check_path("tensorboard", board)
    if not _is_whole(every, 1):
        raise UsageError(f"every: {every!r} is no whole number of batches from 1 on")
    if not isinstance(nvml, (bool, Nvml)) and nvml != "auto":
        raise UsageError(f"nvml: {nvml!r} is none of 'auto', True, False and an open Nvml")
    if isinstance(verbose, str) or verbose not in (0, 1):
        raise UsageError(f"verbose: {verbose!r} is neither 0 nor 1")
    if isinstance(devices, str) or (devices is not None and not isinstance(devices, Sequence)):
        raise UsageError(f"devices: {devices!r} is no list of devices; write for example ['GPU:0']")
    for name in devices or ():
        if not isinstance(name, str) or not _DEVICE_NAME.match(name):
            raise UsageError(f"devices: {name!r} is no logical device such as 'GPU:0'")
    if keep is not None and not _is_whole(keep, 0):
        raise UsageError(f"keep: {keep!r} is neither None nor a number of samples from 0 on")
    if isinstance(sampling, bool) or not isinstance(sampling, Real) or not 0 <= float(sampling) <= 1000:
        raise UsageError(f"sampling: {sampling!r} is no number of readings a second from 0 to 1000")


def _is_whole(value: object, least: int) -> bool:
    """Whether it is a whole number, numpy's kinds included, and not too small."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool) and int(value) >= least


def _check_path(name: str, path: object) -> None:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise UsageError(f"{name}: {path!r} is no path")
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UsageError(f"{name}: {_text(path)!r} cannot be a file's name: {error.reason}") from error
    if b"\0" in encoded:
        raise UsageError(f"{name}: {_text(path)!r} cannot be a file's name: there is a NUL character in it")


def _text(path: object) -> str:
    return str(os.fspath(path))  # type: ignore[call-overload]
