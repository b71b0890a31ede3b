"""What one look at a machine shows: cards, processes, and how far the training runs in them have come."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kerasmem.devices.limits import HostLimits, read_limits
from kerasmem.devices.live import LiveMachine, read_machine
from kerasmem.devices.nvml import NvmlApi
from kerasmem.devices.processes import (
    CardProcess,
    ProcessView,
    all_card_processes,
    open_files,
    python_processes,
    view_process,
)
from kerasmem.errors import InputError, UsageError
from kerasmem.files import read_json
from kerasmem.monitoring.logfile import read_timeline_text
from kerasmem.monitoring.timeline import Sample
from kerasmem.records import Record

_SUFFIXES = (".csv", ".jsonl", ".ndjson")
_TAIL = 65536


@dataclass(frozen=True)
class RunStatus(Record, what="run"):
    """How far a training run has come, from its `MemoryLogger`'s log file; sizes in bytes.

    Attributes:
        path: the file.
        pid: of the process that has it open; None where it was named by the user.
        run: number of the run.
        phase: of the newest sample, such as "train".
        epoch, batch: Keras's numbers, from 0; None outside.
        peak_bytes: the allocator's in that batch; None where that is not known.
        in_use_bytes: the allocator's, then.
        age_seconds: since the file was last written.
    """

    path: str
    pid: int | None
    run: int
    phase: str
    epoch: int | None
    batch: int | None
    peak_bytes: int | None
    in_use_bytes: int | None
    age_seconds: float


@dataclass(frozen=True)
class Snapshot(Record, what="snapshot", version=1):
    """A machine at one time.

    Attributes:
        time: seconds since 1970.
        machine: cards and host memory.
        limits: what this job may have of the host's.
        on_cards: who has memory on the cards.
        processes: the process asked for, or all that have a log open.
        runs: what their logs say.
    """

    time: float
    machine: LiveMachine
    limits: HostLimits
    on_cards: tuple[CardProcess, ...]
    processes: tuple[ProcessView, ...]
    runs: tuple[RunStatus, ...]

    def sizes(self) -> dict[str, int]:
        """Return the sizes whose course is worth seeing, each under a name; bytes."""
        host = self.machine.host
        found = {"host": host.total_bytes - host.available_bytes}
        for device in self.machine.devices:
            if device.used_bytes is not None:
                found[f"card {device.index}"] = device.used_bytes
        for process in self.processes:
            found[f"process {process.pid}"] = process.tree_bytes
        return found


def read_snapshot(
    pid: int | None = None,
    log: str | os.PathLike[str] | None = None,
    *,
    api: NvmlApi | None = None,
    environ: Mapping[str, str] | None = None,
) -> Snapshot:
    """Look at the machine now; takes some ten milliseconds, and loads no TensorFlow.

    Args:
        pid: the process to show; default: all Python processes that have a `MemoryLogger`'s log open.
        log: a log to show too.
        api: what to ask in place of nvidia-ml-py, such as a recording.
        environ: environment variables that choose cards and tell of Slurm; default: this process's.

    Raises:
        UsageError: there is no such process.
        InputError: the log cannot be read.
    """
    runs = [] if log is None else [_status(Path(log), None)]
    pids = python_processes() if pid is None else [pid]
    processes = []
    for each in pids:
        own = [status for path in open_files(each, _SUFFIXES) if (status := _try_status(path, each)) is not None]
        runs += own
        if pid is not None:
            processes.append(view_process(each))
        elif own:
            with contextlib.suppress(UsageError):  # it has just ended
                processes.append(view_process(each))
    machine = read_machine(api=api, environ=environ)
    limits = read_limits(machine.host.total_bytes, environ=environ)
    on_cards = tuple(all_card_processes(api)) if machine.devices else ()
    return Snapshot(time.time(), machine, limits, on_cards, tuple(processes), tuple(runs))


def _try_status(path: Path, pid: int) -> RunStatus | None:
    with contextlib.suppress(InputError):
        return _status(path, pid)
    return None


def _status(path: Path, pid: int | None) -> RunStatus:
    """Return what the end of a log says; of a long one, no more is read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path}: no file; name a log that MemoryLogger wrote")
            head = file.readline(_TAIL)
            size = status.st_size
            file.seek(max(len(head), size - _TAIL))
            tail = file.read(_TAIL)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if size > len(head) + _TAIL:
        tail = tail.partition(b"\n")[2]
    sample = _newest((head + tail).decode("utf-8", "replace"), str(path))
    age = max(0.0, time.time() - status.st_mtime)
    where = (sample.run, sample.phase, sample.epoch, sample.batch)
    return RunStatus(str(path), pid, *where, sample.peak_bytes, sample.in_use_bytes, age)


def _newest(text: str, name: str) -> Sample:
    timeline = read_timeline_text(text, name)
    if len(timeline) == 0:
        if text.startswith("{"):
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                run = int(read_json(text.splitlines()[0])["run"])
                return Sample(run, 0.0, "starting", None, None, 0, None, *[None] * 8)
        raise InputError(f"{name}: no sample in it yet; name a log that MemoryLogger wrote")
    return timeline[-1]
