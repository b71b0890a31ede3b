"""Cases, targets and verdicts."""

from __future__ import annotations

import contextlib
import io
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECRET = b"TOP-SECRET-CANARY-"  # in other files; no output of a case may contain it
HEAP = b"HEAP-CANARY-"  # in freed memory; no output may contain it
_SIZES = (600, 2000, 4096, 8192, 16000, 40000, 100_000)
Report = Callable[[str], None]
"""Reports the present stage to the watching process."""


@dataclass(frozen=True)
class Case:
    """Untrusted files and the commands that read them.

    Attributes:
        files: Content by name in the case's folder.
        commands: Arguments of `kerasmem`, one command after another.
        origin: Unchanged content of changed files, by which a find is reduced.
        note: How the case was made.
        options: Further settings for the target, plain values only.
    """

    files: dict[str, bytes]
    commands: tuple[tuple[str, ...], ...] = ()
    origin: dict[str, bytes] = field(default_factory=dict)
    note: str = ""
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Outcome of a case.

    Attributes:
        kind: "ok", "refused", another harmless outcome, or one of `FINDS`.
        detail: Distinguishes finds of one kind.
    """

    kind: str
    detail: str = ""


FINDS = ("crash", "hang", "memory", "defect", "outside", "leak", "wrong", "lenient", "unstable")
"""Kinds of verdict that are kept.

crash: ended by a signal. hang: over the time limit. memory: over the memory limit. defect: a traceback, or an error
unknown to kerasmem. outside: bytes of another file were read. leak: memory of the process was output. wrong: data
differ from the judge's. lenient: data where the judge fails. unstable: two readings differ.
"""


class Target:
    """A kind of untrusted input: makes cases, and tries them in a process that may end at any time."""

    name = ""
    seconds = 4.0  # CPU time limit of a case
    waiting = 20.0  # wall time limit in seconds
    memory = 1 << 30  # limit of growth in bytes
    batch = 20  # cases of one process

    def prepare(self, folder: Path) -> None:
        """Import modules for the forked processes, and make the sound files."""
        raise NotImplementedError

    def make(self, draw: random.Random) -> Case:
        """Return a case."""
        raise NotImplementedError

    def attempt(self, case: Case, report: Report) -> Verdict:
        """Try a case in the current folder."""
        return judge_commands(case, report)

    def library(self, case: Case) -> None:
        """Read a case's files with the library alone, to attribute a crash or an endless loop."""

    def seal(self, case: Case, data: bytes) -> bytes:
        """Return a file of a case with its checksums corrected, if the format has any."""
        return data


@dataclass(frozen=True)
class Done:
    """Exit code, outputs and error of a command."""

    code: int
    out: str
    err: str
    error: Exception | None = None


def run_command(arguments: Sequence[str]) -> Done:
    """Run `kerasmem ARGUMENTS…` in this process."""
    from kerasmem import cli

    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    errors: list[Exception] = []
    tell = cli._message

    def noted(error: Exception) -> str:
        errors.append(error)
        return tell(error)

    cli._message = noted
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(list(arguments))
        except SystemExit as ended:
            code = ended.code
        finally:
            cli._message = tell
    return Done(code if isinstance(code, int) else 1, out.getvalue(), err.getvalue(), *errors)


def judge_commands(case: Case, report: Report) -> Verdict:
    """Run a case's commands and return the worst outcome."""
    refused = ""
    for arguments in case.commands:
        report(" ".join(arguments[:2]))
        done = run_command(arguments)
        verdict = judge_command(done, case)
        if verdict.kind in FINDS:
            return verdict
        refused = refused or (verdict.detail if verdict.kind == "refused" else "")
    return Verdict("refused", refused) if refused else Verdict("ok")


def judge_command(done: Done, case: Case) -> Verdict:
    """Judge a command by its exit code, outputs and files."""
    for canary, kind in ((SECRET, "outside"), (HEAP, "leak")):
        if where := _holds(canary, done, case):
            return Verdict(kind, f"{canary.decode()} in {where}")
    if Path("OWNED").exists():
        return Verdict("outside", "code of a file has run")
    if isinstance(done.error, MemoryError):
        return Verdict("memory", place_of(done.error))
    if "This is a defect in kerasmem" in done.err and done.error is not None:
        return Verdict("defect", place_of(done.error))
    if "Traceback (most recent" in done.err:
        return Verdict("defect", f"a traceback is printed: {done.err[-200:]}")
    if done.code in (0, 3, 4):
        return Verdict("ok")
    if done.code not in (1, 2) or not done.err.strip():
        return Verdict("defect", f"exit code {done.code}: {done.err[-200:]}")
    return Verdict("refused", done.err.strip()[-400:])


def place_of(error: BaseException) -> str:
    """Return an error and the innermost function of kerasmem that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/kerasmem/" in frame.filename]
    where = f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "nowhere"
    return f"{type(error).__name__}: {str(error)[:160]} in {where}"


def _holds(canary: bytes, done: Done, case: Case) -> str:
    text = canary.decode()
    if text in done.out or text in done.err:
        return "what is printed"
    for path in Path().rglob("*"):
        if str(path) in case.files or path.is_symlink() or not path.is_file():
            continue
        if canary in path.read_bytes():
            return str(path)
    return ""


def fill_heap(number: int) -> None:
    """Fill freed memory with a pattern, so that uninitialised memory is recognised."""
    pattern = HEAP + bytes([48 + number])
    kept = [bytearray(pattern * (size // len(pattern))) for size in _SIZES for _ in range(4)]
    del kept
