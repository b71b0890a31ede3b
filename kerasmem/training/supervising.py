"""`kerasmem run`: a script in a process of its own, run again from where it was when memory ran out."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.processes.children import exit_reason, start_module
from kerasmem.training.progress import FOLDER, RAN_OUT, Record, Standing, read_json, write_json

_DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
_MOST_AT_ONE_PLACE = 3  # without a step of training in between, and with no smaller micro-batches to try


def supervise(
    script: str,
    arguments: Sequence[str],
    *,
    say: Callable[[str], None],
    micro_batches: int | None = None,
    every: int = 100,
    restarts: int = 50,
    folder: str | None = None,
) -> int:
    """Run a script until it ends by itself, or nothing more can be done; return the exit code.

    Args:
        script: path of a Python script.
        arguments: for it.
        say: called with a sentence for each restart, and at an end that is not the script's own.
        micro_batches: pieces of a batch from the start.
        every: batches from one saving to the next.
        restarts: no more than so many.
        folder: where to keep the run's checkpoints; they are left there, and a later call goes on from them.

    Raises:
        UsageError: there is no such script.
    """
    if not os.path.isfile(script):
        raise UsageError(f"{script}: there is no such script")
    with tempfile.TemporaryDirectory(prefix="kerasmem-run-") as own:
        place = own if folder is None else os.path.abspath(folder)
        os.makedirs(place, exist_ok=True)
        write_json(place, "settings", {"micro_batches": micro_batches, "every": every})
        return _Supervisor(script, list(arguments), place, say, restarts).run()


class _Supervisor:
    def __init__(
        self, script: str, arguments: list[str], folder: str, say: Callable[[str], None], restarts: int
    ) -> None:
        self._arguments = [script, *arguments]
        self._folder, self._say, self._left = folder, say, restarts
        self._last: Standing | None = None
        self._here = 0  # deaths at one place

    def run(self) -> int:
        while True:
            code = self._once()
            if code != RAN_OUT and -code not in _DEATHS:
                return 128 - code if code < 0 else code
            standing = Record(self._folder).read()
            failure = read_json(self._folder, "failure") if code == RAN_OUT else {}
            given_up = self._why_not(code, standing, failure)
            if given_up is not None:
                self._say(given_up)
                return 1 if code == RAN_OUT else 128 - code
            self._left -= 1

    def _once(self) -> int:
        process = start_module(
            "kerasmem.training.script",
            *self._arguments,
            environ={**os.environ, FOLDER: self._folder},
            own_group=False,
            stdin=None,  # the script's is ours
        )
        before = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal has sent it to the script too
            try:
                process.wait(10)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    def _why_not(self, code: int, standing: Standing, failure: dict[str, Any]) -> str | None:
        """Plan the next run; or return why there is none."""
        how = _how(code, failure)
        if not standing.in_fit:
            return (
                f"outside of model.fit, where nothing is saved, the script was ended {how}; a training loop of its own "
                "(train_on_batch, GradientTape) cannot be gone on with"
            )
        if self._left == 0:
            return f"the script was ended {how}, and there have been as many restarts as are allowed"
        moved = self._last is None or (standing.fit, standing.epoch, standing.batch) > self._place(self._last)
        self._here = 1 if moved else self._here + 1
        self._last = standing
        kind, rows = failure.get("kind", "train"), failure.get("rows", standing.rows)
        size = failure.get("size", standing.size)
        if failure.get("certain") or self._here > 1:
            now = min(size or rows, rows)
            if now > 1:
                size = -(-now // 2)
                plan = read_json(self._folder, "plan")
                write_json(self._folder, "plan", {**plan, f"{standing.fit} {kind}": size})
            elif failure.get("certain") or self._here > _MOST_AT_ONE_PLACE:
                return f"the script was ended {how}, with one row at a time too. {_summary(failure)}".rstrip()
        pieces = f"in micro-batches of {size} rows" if size and size < rows else "with whole batches"
        pieces = f"validating {pieces}" if kind == "test" else pieces
        self._say(
            f"in fit {standing.fit}, epoch {standing.epoch + 1}, batch {standing.batch + 1}, the script was ended {how}"
            f"; it is run again and goes on from the last checkpoint, {pieces}"
        )
        return None

    @staticmethod
    def _place(standing: Standing) -> tuple[int, int, int]:
        return standing.fit, standing.epoch, standing.batch


def _how(code: int, failure: dict[str, Any]) -> str:
    if code == RAN_OUT:
        return f"by want of memory ({_summary(failure).rstrip('.')})"
    return f"by {exit_reason(code)}"


def _summary(failure: dict[str, Any]) -> str:
    diagnosis = failure.get("diagnosis")
    return str(diagnosis.get("summary", "")) if isinstance(diagnosis, dict) else ""
