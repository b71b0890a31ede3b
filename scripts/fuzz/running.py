"""Try cases in forked processes with a limit of time and memory."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from cases import FINDS, SECRET, Case, Target, Verdict

from kerasmem.processes.children import die_with_parent

_POLL_SECONDS = 0.1
ENDED = ("crash", "hang", "memory")  # kinds that end a process
_PACKAGES = {path.name for path in (Path(__file__).resolve().parents[2] / "kerasmem").rglob("*") if path.is_dir()}
_LARGEST_FILE = 1 << 30
_OWN_FAULT = 70  # exit code of a process whose target raised
_TRIALS = 30  # to make a find smaller
_VIRTUAL = 6 << 30  # bytes of addresses that a process may take


@dataclass(frozen=True)
class Tried:
    """A case with its verdict and the name of its last step."""

    case: Case
    verdict: Verdict
    stage: str = ""


class Runner:
    """Tries cases of one prepared target, many in one forked process.

    Args:
        target: The target.
        folder: Holds the files of cases, and those that must not be read.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self._folder = folder / "case"
        self._secrets = folder / "private"
        self._log = folder / "stderr"
        self._resident = _usage(os.getpid()).resident

    def tried(self, cases: Sequence[Case]) -> Iterator[Tried]:
        """Yield each case with its verdict, in order."""
        todo = list(cases)
        while todo:
            done = 0
            for result in self._one_process(todo):
                done += 1
                yield result
            todo = todo[done:]

    def alone(self, case: Case) -> Tried:
        """Try one case in a process of its own."""
        return next(iter(self.tried([case])))

    def confirmed(self, found: Tried) -> Tried | None:
        """Return the reduced find if it repeats in a process of its own, else None.

        A crash or endless loop of the library alone gets a kind such as "library crash" and is not reduced.
        """
        again = self.alone(found.case)
        if again.verdict.kind != found.verdict.kind:
            return None
        if again.verdict.kind in ENDED:
            by_library = next(self._one_process([found.case], library=True))
            if by_library.verdict.kind in ENDED:
                return Tried(found.case, Verdict(f"library {again.verdict.kind}", again.verdict.detail), again.stage)
        return self._smaller(again)

    def _smaller(self, found: Tried) -> Tried:
        """Restore original bytes of the files as long as the find repeats."""
        trials = 5 if found.verdict.kind == "hang" else _TRIALS
        for name, origin in found.case.origin.items():
            if len(origin) != len(found.case.files[name]):
                continue
            for start, end in reversed(_differences(origin, found.case.files[name])):
                trials -= 1
                if trials < 0:
                    return found
                data = bytearray(found.case.files[name])
                data[start:end] = origin[start:end]
                files = {**found.case.files, name: self.target.seal(found.case, bytes(data))}
                case = Case(files, found.case.commands, found.case.origin, found.case.note, found.case.options)
                again = self.alone(case)
                if again.verdict == found.verdict:
                    found = again
        return found

    def _one_process(self, cases: Sequence[Case], *, library: bool = False) -> Iterator[Tried]:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            os.close(reading)
            try:
                self._child(cases, writing, library)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(_OWN_FAULT)
        os.close(writing)
        try:
            yield from self._watch(pid, reading, cases)
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _child(self, cases: Sequence[Case], writing: int, library: bool) -> None:
        os.setsid()
        die_with_parent()
        log = os.open(self._log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for standard, end in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(end, standard)
        faulthandler.enable(log)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
        most = _usage(os.getpid()).virtual + _VIRTUAL
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

        def tell(kind: str, text: str) -> None:
            os.write(writing, f"{kind} {text}".replace("\n", " ").encode(errors="replace")[:2000] + b"\n")

        for case in cases:
            self._lay_out(case)
            tell("B", "")
            if library:
                with contextlib.suppress(Exception):
                    self.target.library(case)
                tell("D", json.dumps(["ok", ""]))
                continue
            verdict = self.target.attempt(case, lambda stage: tell("S", stage))
            if verdict.kind not in FINDS and b"Traceback" in (printed := self._log.read_bytes()):
                verdict = Verdict("defect", "a traceback of a thread: " + printed.decode(errors="replace")[-300:])
            if SECRET in self._log.read_bytes():
                verdict = Verdict("outside", "on standard error")
            tell("D", json.dumps([verdict.kind, verdict.detail[:600]]))
        gc.collect()

    def _lay_out(self, case: Case) -> None:
        os.chdir(self._folder.parent)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for name, data in case.files.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        os.chdir(self._folder)

    def _watch(self, pid: int, reading: int, cases: Sequence[Case]) -> Iterator[Tried]:
        number, stage, rest, began = 0, "", b"", (time.monotonic(), 0.0)
        ended: Verdict | None = None
        while ended is None:
            if select.select([reading], [], [], _POLL_SECONDS)[0]:
                received = os.read(reading, 1 << 16)
                if not received:
                    break
                *lines, rest = (rest + received).split(b"\n")
                for line in lines:
                    kind, text = chr(line[0]), line[2:].decode(errors="replace")
                    began = (time.monotonic(), _usage(pid).seconds) if kind == "B" else began
                    stage = "" if kind == "B" else text if kind == "S" else stage
                    if kind == "D":
                        yield Tried(cases[number], Verdict(*json.loads(text)), stage)
                        number += 1
            usage = _usage(pid)
            if usage.seconds - began[1] > self.target.seconds or time.monotonic() - began[0] > self.target.waiting:
                ended = Verdict("hang", self._stacks(pid))
            elif (size := usage.resident - self._resident) > self.target.memory:
                ended = Verdict("memory", f"{self._stacks(pid)} {size >> 30} GiB")
        if ended is None:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if number == len(cases):
                return
            if status == _OWN_FAULT:
                raise RuntimeError(f"the target itself failed: {self._log.read_text(errors='replace')[-2000:]}")
            ended = Verdict("crash", f"{signal.Signals(-status).name if status < 0 else status}: {self._logged()}")
        kind = f"judge {ended.kind}" if stage.startswith("judge") else ended.kind
        yield Tried(cases[number], Verdict(kind, ended.detail), stage)

    def _stacks(self, pid: int) -> str:
        """Abort a process and return the stack that it prints."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
        time.sleep(0.2)
        return self._logged()

    def _logged(self) -> str:
        """Return the innermost functions of kerasmem in a printed stack."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        places = re.findall(r'File "[^"]*?([\w.]+/[\w.]+\.py)", line \d+ in (\S+)', text)
        ours = [(file, name) for file, name in places if file.partition("/")[0] in _PACKAGES]
        return " < ".join(f"{file}:{name}" for file, name in (ours or places)[:4]) or text[-200:]


def _differences(one: bytes, other: bytes) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for at, (a, b) in enumerate(zip(one, other, strict=True)):
        if a == b:
            continue
        if runs and runs[-1][1] >= at - 3:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs


class _Usage(NamedTuple):
    """Resident and virtual bytes of a process, and the CPU seconds of it and its ended children."""

    resident: int
    virtual: int
    seconds: float


def _usage(pid: int) -> _Usage:
    """Return the usage of a process, zeros if it has just ended."""
    try:
        process = psutil.Process(pid)
        memory = process.memory_info()
        return _Usage(memory.rss, memory.vms, sum(process.cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return _Usage(0, 0, 0.0)


def lay_out_secrets(folder: Path) -> None:
    """Create a text and a pipe without a writer that no case may read."""
    private = folder / "private"
    private.mkdir(parents=True, exist_ok=True)
    (private / "secret.txt").write_bytes(SECRET * 64)
    os.mkfifo(private / "pipe")


def draw_of(target: str, seed: int, number: int) -> random.Random:
    """Return the reproducible random numbers of a case."""
    return random.Random(f"{target} {seed} {number}")
