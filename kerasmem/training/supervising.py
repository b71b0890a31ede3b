"""`kerasmem run`: run a script with `kerasmem.fit` for `model.fit`, again after it was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kerasmem import files
from kerasmem.errors import UsageError
from kerasmem.processes.children import GOES_ON, SIGKILL, exit_reason, start_module

_DEATHS = (SIGKILL, signal.SIGSEGV, signal.SIGABRT, getattr(signal, "SIGBUS", SIGKILL))
_MOST_HALVINGS = 10
# Steps that XLA compiles run in a process of their own, which needs a part of the card.
_GROWTH = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}


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
    """Run a script, again after it was killed if there is a folder, and return its exit code.

    Args:
        script: path of a Python script.
        arguments: for the script.
        say: called with a sentence for each restart, and if the script is not started again.
        micro_batches: pieces of a batch from the start.
        save_freq: batches between two checkpoints.
        restarts: maximum number of restarts.
        folder: folder for checkpoints, one for each `fit`. They are removed when the script ends with exit code 0.
        is_module: `script` is the name of a module, as after `python -m`.

    Raises:
        UsageError: If the script does not exist.
    """
    if not is_module and not os.path.isfile(script):
        raise UsageError(f"{script}: there is no such script")
    if folder is not None:
        folder = os.path.realpath(folder)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        files.own_folder("checkpoint", folder)
    command = [*(["-m"] if is_module else []), script, *arguments]
    deaths = 0  # since a checkpoint was last written
    while True:
        before = _checkpoints(folder)
        pieces = (micro_batches or 1) * 2 ** max(0, deaths - 1)
        options = {"folder": folder, "save_freq": save_freq, "micro_batches": pieces if pieces > 1 else None}
        process = start_module(
            "kerasmem.training.script",
            json.dumps(options),
            *command,
            environ={**_GROWTH, **os.environ, GOES_ON: "1" if before else ""},
            own_group=False,
            stdin=None,  # the script's is ours
        )
        code = _wait(process)
        if folder is None or -code not in _DEATHS:
            if folder is not None and code == 0:
                _remove_checkpoints(folder)
            return 128 - code if code < 0 else code
        after = _checkpoints(folder)
        deaths = deaths + 1 if after == before else 1
        reason = _reason_to_stop(after, deaths, restarts)
        if reason is not None:
            say(f"the script was ended by {exit_reason(code)}; {reason}")
            return 128 - code
        restarts -= 1
        smaller = f", with its batches divided by {2 ** (deaths - 1)}" if deaths > 1 else ""
        say(
            f"in {max(after, key=lambda name: after[name])} the script was ended by {exit_reason(code)}; it is started "
            f"again and resumes from the last checkpoint{smaller}"
        )


def _reason_to_stop(checkpoints: Mapping[str, int], deaths: int, restarts: int) -> str | None:
    if not checkpoints:
        return "it is not started again: no step of model.fit was saved, and loops of train_on_batch cannot be"
    if restarts == 0:
        return "it is not started again: --restarts is used up"
    if deaths > _MOST_HALVINGS + 1:
        return f"it is not started again: that happened {deaths} times since the last checkpoint"
    return None


def _checkpoints(folder: str | None) -> dict[str, int]:
    """Return the modification time of each file of the folder."""
    if folder is None:
        return {}
    with os.scandir(folder) as entries:
        return {each.name: each.stat().st_mtime_ns for each in entries if not each.name.endswith(".part")}


def _remove_checkpoints(folder: str) -> None:
    for name in os.listdir(folder):
        if name.startswith("fit-"):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):  # it holds files of the script's
        os.rmdir(folder)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the script, after passing on signals that were sent to this process alone."""

    def forward(number: int, frame: Any) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():  # a terminal sends Ctrl-C to the script, too
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
