"""The arguments of `MemoryLogger`, checked when it is made rather than when training has begun."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from kerasmem.devices.nvml import Nvml
from kerasmem.errors import UsageError

_DEVICE_NAME = re.compile(r"[A-Za-z_]+:\d+\Z")


def check_arguments(
    filename: object, every: object, nvml: object, verbose: object, devices: object, keep: object
) -> None:
    """Raise UsageError for an argument that cannot be right."""
    if filename is not None:
        if not isinstance(filename, (str, os.PathLike)):
            raise UsageError(f"filename: {filename!r} is no path")
        if os.path.isdir(filename):
            raise UsageError(f"filename: {os.fspath(filename)!r} is a folder; name a file in it, such as memory.csv")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
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
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
        raise UsageError(f"keep: {keep!r} is neither None nor a number of samples from 0 on")
