"""The arguments of `MemoryLogger`, checked when it is made rather than when training has begun."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kerasmem.checks import choice, number, path, whole
from kerasmem.devices.nvml import Nvml
from kerasmem.errors import UsageError
from kerasmem.monitoring.logfile import format_of

_DEVICE_NAME = re.compile(r"[A-Za-z_]+:\d+\Z")


@dataclass
class LoggerSettings:
    """What a logger is to do; `MemoryLogger` has the meaning of each.

    Raises:
        UsageError: an argument cannot be right.
    """

    filename: str | os.PathLike[str] | None
    append: bool
    update_freq: int
    nvml: Nvml | bool | str
    verbose: int
    devices: Sequence[str] | None
    reset_peaks: bool
    epoch_logs: bool | str
    sampling: float
    leaks: bool

    def __post_init__(self) -> None:
        if self.filename is not None and os.path.isdir(path("filename", self.filename)):
            folder = os.fspath(self.filename)
            raise UsageError(f"filename: {folder!r} is a folder; name a file in it, such as memory.csv")
        self.update_freq = whole("update_freq", self.update_freq)
        if not isinstance(self.nvml, Nvml):
            choice("nvml", self.nvml, ("auto", True, False))
        choice("epoch_logs", self.epoch_logs, (True, False, "bytes"))
        choice("verbose", self.verbose, (0, 1, False, True))
        if isinstance(self.devices, str) or not isinstance(self.devices, (Sequence, type(None))):
            raise UsageError(f"devices: {self.devices!r} is no list of devices; write for example ['GPU:0']")
        for name in self.devices or ():
            if not isinstance(name, str) or not _DEVICE_NAME.match(name):
                raise UsageError(f"devices: {name!r} is no logical device such as 'GPU:0'")
        self.sampling = number("sampling", self.sampling, 0, 1000)
        if self.filename is not None:
            format_of(self.filename)
