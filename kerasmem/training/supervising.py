"""`kerasmem run`: a script in a process of its own, run again from where it was when memory ran out."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.processes.children import GOES_ON, SIGKILL, exit_reason, start_module
from kerasmem.training.run_folder import RAN_OUT, VARIABLE, RunFolder, ScriptPosition

_DEATHS = (SIGKILL, signal.SIGSEGV, signal.SIGABRT, getattr(signal, "SIGBUS", SIGKILL))
_POLL_SECONDS = 0.5
_SENT_BY_PROCESS = 0  # `si_code` of a signal by kill(2), and above that of one by the kernel
_MOST_AT_ONE_PLACE = 3  # without a step of training in between, and with no smaller micro-batches to try


def supervise(
    script: str,
    arguments: Sequence[str],
    *,
    say: Callable[[str], None],
    micro_batches: int | None = None,
    save_freq: int = 100,
    restarts: int = 50,
    folder: str | None = None,
    is_module: bool = False,
) -> int:
    """Run a script until it ends by itself, or nothing more can be done; return the exit code.

    Args:
        script: path of a Python script.
        arguments: for it.
        say: called with a sentence for each restart, and at an end that is not the script's own.
        micro_batches: pieces of a batch from the start.
        save_freq: batches from one saving to the next.
        restarts: no more than so many.
        folder: where to keep the run's checkpoints; they are left there, and a later call goes on from them.
        is_module: `script` is the name of a module, as after `python -m`.

    Raises:
        UsageError: there is no such script.
    """
    if not hasattr(os, "pwrite"):
        raise UsageError(
            "kerasmem run works on Linux and macOS; in the script, use kerasmem.fit(model, x, y, checkpoint='run.ckpt')"
        )
    if not is_module and not os.path.isfile(script):
        raise UsageError(f"{script}: there is no such script")
    with tempfile.TemporaryDirectory(prefix="kerasmem-run-") as own:
        kept = RunFolder(own if folder is None else os.path.abspath(folder))
        kept.write("settings", {"micro_batches": micro_batches, "save_freq": save_freq})
        return Supervisor([*(["-m"] if is_module else []), script, *arguments], kept, say, restarts).run()


class Supervisor:
    """Runs one script, and runs it again.

    Args:
        arguments: the script or "-m" and the module, and what follows it.
        folder: of the run.
        say, restarts: as for `supervise`.
    """

    def __init__(self, arguments: Sequence[str], folder: RunFolder, say: Callable[[str], None], restarts: int) -> None:
        self._arguments = arguments
        self._folder, self._say, self._restarts = folder, say, restarts
        self._last: ScriptPosition | None = None
        self._deaths_here = 0
        self._asked: int | None = None  # bytes that the last failure asked for

    def run(self) -> int:
        """Run the script until it ends by itself, or nothing more can be done; return the exit code."""
        while True:
            code = self._once()
            if code != RAN_OUT and -code not in _DEATHS:
                return 128 - code if code < 0 else code
            failure = self._folder.read("failure") if code == RAN_OUT else {}
            given_up = self.plan(code, self._folder.position(), failure)
            if given_up is not None:
                self._say(given_up)
                return 1 if code == RAN_OUT else 128 - code
            self._restarts -= 1

    def _once(self) -> int:
        process = start_module(
            "kerasmem.training.script",
            *self._arguments,
            environ={
                **os.environ,
                VARIABLE: self._folder.path,
                GOES_ON: "1" if self._folder.position().fit else "",
            },
            own_group=False,
            stdin=None,  # the script's is ours
        )
        return _wait(process) if hasattr(signal, "sigtimedwait") else _wait_plainly(process)

    def plan(self, code: int, at: ScriptPosition, failure: dict[str, Any]) -> str | None:
        """Plan the next run of the script; or return why there is none.

        Args:
            code: exit code of the last one.
            at: where it was.
            failure: what it said before it died; empty where it said nothing.
        """
        how = _how(code, failure)
        if not at.in_fit:
            return (
                f"outside of model.fit, where nothing is saved, the script was ended {how}; a training loop of its own "
                "(train_on_batch, GradientTape) cannot be gone on with"
            )
        if self._restarts == 0:
            return f"the script was ended {how}, and there have been as many restarts as are allowed"
        has_moved = self._last is None or at[:3] > self._last[:3]
        self._deaths_here = 1 if has_moved else self._deaths_here + 1
        self._last = at
        kind, rows = failure.get("kind", "train"), failure.get("rows", at.rows)
        size = failure.get("size", at.size)
        if failure.get("certain") or self._deaths_here > 1:
            now = min(size or rows, rows)
            if now > 1:
                asked, before = _requested(failure), self._asked
                self._asked = asked
                is_stuck = self._deaths_here > 1 and asked is not None and before is not None and asked >= before
                size = 1 if is_stuck else -(-now // 2)
                place = f"{at.fit} {kind}"
                self._folder.write("plan", {**self._folder.read("plan"), place: size})
                self._folder.write("guess", {place: self._deaths_here == 1})
            elif failure.get("certain") or self._deaths_here > _MOST_AT_ONE_PLACE:
                return (
                    f"the script was ended {how}, with one row at a time too; a smaller batch cannot help: see "
                    "kerasmem.advise, kerasmem.recompute, a smaller model or a larger card"
                )
        pieces = f"in micro-batches of {size} rows" if size and size < rows else "with whole batches"
        pieces = f"validating {pieces}" if kind == "test" else pieces
        self._say(
            f"in fit {at.fit}, epoch {at.epoch + 1}, batch {at.batch + 1}, the script was ended {how}"
            f"; it is run again and goes on from the last checkpoint, {pieces}"
        )
        return None


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the script; signals that were sent to this process alone are handed on to it.

    Ctrl-C in a terminal, which the kernel sends, has reached the script too.
    """
    awaited = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        while process.poll() is None:
            told = signal.sigtimedwait(awaited, _POLL_SECONDS)
            if told is not None and told.si_signo != signal.SIGCHLD and told.si_code <= _SENT_BY_PROCESS:
                process.send_signal(told.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode


def _wait_plainly(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the script, where the system does not tell who has sent a signal."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # the terminal has sent it to the script too
                return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _how(code: int, failure: dict[str, Any]) -> str:
    if code == RAN_OUT:
        return f"by want of memory ({_summary(failure).rstrip('.')})"
    return f"by {exit_reason(code)}"


def _requested(failure: dict[str, Any]) -> int | None:
    diagnosis = failure.get("diagnosis")
    asked = diagnosis.get("requested_bytes") if isinstance(diagnosis, dict) else None
    return asked if isinstance(asked, int) else None


def _summary(failure: dict[str, Any]) -> str:
    diagnosis = failure.get("diagnosis")
    return str(diagnosis.get("summary", "")) if isinstance(diagnosis, dict) else ""
