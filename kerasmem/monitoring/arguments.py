"""The arguments of `MemoryLogger`, checked when it is made rather than when training has begun."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from kerasmem.checks import choice, number, path, whole
from kerasmem.devices.nvml import Nvml
from kerasmem.errors import UsageError

_DEVICE_NAME = re.compile(r"[A-Za-z_]+:\d+\Z")


def check_arguments(
    filename: Any, update_freq: object, nvml: object, verbose: object, devices: object, keep: object,
    board: object = None, sampling: object = 20.0,
) -> None:  # fmt: skip
    """Raise UsageError for an argument that cannot be right."""
    if filename is not None and os.path.isdir(path("filename", filename)):
        raise UsageError(f"filename: {os.fspath(filename)!r} is a folder; name a file in it, such as memory.csv")
    if board is not None:
        path("tensorboard", board)
    whole("update_freq", update_freq)
    if not isinstance(nvml, Nvml):
        choice("nvml", nvml, ("auto", True, False))
    choice("verbose", verbose, (0, 1, False, True))
    _check_devices(devices)
    if keep is not None:
        whole("keep", keep, 0)
    number("sampling", sampling, 0, 1000)


def _check_devices(devices: object) -> None:
    if isinstance(devices, str) or (devices is not None and not isinstance(devices, Sequence)):
        raise UsageError(f"devices: {devices!r} is no list of devices; write for example ['GPU:0']")
    for name in devices or ():
        if not isinstance(name, str) or not _DEVICE_NAME.match(name):
            raise UsageError(f"devices: {name!r} is no logical device such as 'GPU:0'")
