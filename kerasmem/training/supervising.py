"""`kerasmem run`: run a script with `kerasmem.fit` instead of `model.fit`, and again after it was killed.

`supervise` starts `python -m kerasmem.training.supervising OPTIONS SCRIPT ARGUMENTS…` (or `-m MODULE`); there `main`
replaces `model.fit` and runs the script.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from kerasmem import files
from kerasmem.errors import UsageError, warn_user
from kerasmem.processes.children import GOES_ON, SIGKILL, exit_reason, start_module

_DEATHS = (SIGKILL, signal.SIGSEGV, signal.SIGABRT, getattr(signal, "SIGBUS", SIGKILL))
_MOST_HALVINGS = 10
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Steps under XLA run in a separate process, which needs a part of the card.
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
    """Run a script, restart it after a kill if there is a folder, and return its exit code.

    Args:
        script: path of a Python script.
        arguments: arguments of the script.
        say: called with a sentence for each restart, and if the script is not restarted.
        micro_batches: pieces of a batch from the start.
        save_freq: batches between two checkpoints.
        restarts: maximum number of restarts.
        folder: folder for checkpoints, one for each `fit`. They are removed when the script ends with exit code 0.
        is_module: whether `script` is the name of a module, as after `python -m`.

    Raises:
        UsageError: If the script does not exist.
    """
    if not is_module and not os.path.isfile(script):
        raise UsageError(f"{script}: script not found; give the path of a Python file")
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
            "kerasmem.training.supervising",
            json.dumps(options),
            *command,
            environ={**_GROWTH, **os.environ, GOES_ON: "1" if before else ""},
            own_group=False,
            stdin=None,  # shared with the script
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
        latest = max(after, key=lambda name: after[name])
        say(
            f"in {latest} the script was ended by {exit_reason(code)}; it is restarted and resumes from the last "
            f"checkpoint{smaller}"
        )


def _reason_to_stop(checkpoints: Mapping[str, int], deaths: int, restarts: int) -> str | None:
    if not checkpoints:
        return "it is not restarted, as it saved no step of model.fit; loops of train_on_batch cannot be resumed"
    if restarts == 0:
        return "it is not restarted: --restarts is used up"
    if deaths > _MOST_HALVINGS + 1:
        return f"it is not restarted, as it died {deaths} times since the last checkpoint"
    return None


def _checkpoints(folder: str | None) -> dict[str, int]:
    """Return the modification time of each file of the folder."""
    if folder is None:
        return {}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_mtime_ns for entry in entries if not entry.name.endswith(".part")}


def _remove_checkpoints(folder: str) -> None:
    for name in os.listdir(folder):
        if name.startswith("fit-"):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):  # the script may have put files there
        os.rmdir(folder)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the script, and forward signals that only this process receives."""

    def forward(number: int, frame: Any) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():  # a terminal sends Ctrl-C to the script too
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def replace_fit(keras: ModuleType, *, folder: str | None, micro_batches: int | None, save_freq: int) -> None:
    """Replace `fit` of every Keras model by `kerasmem.fit`.

    Args:
        keras: the module.
        folder: folder for the checkpoint of each call, by its number; None for no checkpoints.
        micro_batches: pieces of a batch from the start.
        save_freq: batches between two checkpoints.
    """
    keras_fit = keras.Model.fit
    signature = inspect.signature(keras_fit)
    numbers = itertools.count(1)

    @functools.wraps(keras_fit)
    def fit(model: Any, *arguments: Any, **named: Any) -> Any:
        if getattr(model.train_function, "is_kerasmem", False):  # called by `kerasmem.fit`
            return keras_fit(model, *arguments, **named)
        from kerasmem.training.fitting import check_fit, make_source, train
        from kerasmem.training.trainer import FitOptions

        bound = signature.bind(model, *arguments, **named).arguments
        del bound["self"]
        number = next(numbers)
        try:
            check_fit(model)
        except UsageError as error:
            _warn(f"fit {number} of the script runs without recovery: {error}")
            return keras_fit(model, *arguments, **named)
        isolated = bool(model.jit_compile)
        options = FitOptions(micro_batches, save_freq=save_freq, isolated=isolated, falls_back=True)
        if folder is None:
            return train(model, bound, options)
        prepared = dict(bound)
        try:
            source = make_source(prepared)
        except UsageError as error:
            _warn(f"fit {number} of the script cannot be resumed: {error}")
            return train(model, bound, options)
        checkpoint = os.path.join(folder, f"fit-{number}")
        return train(model, prepared, replace(options, checkpoint=checkpoint, keep=True), source=source)

    keras.Model.fit = fit


def _warn(text: str) -> None:
    warn_user(f"kerasmem run: {text}", RuntimeWarning)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Replaces `fit` after the script imports Keras, as it may set environment variables before."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                replace_fit(module, **self._options)

            spec.loader.exec_module = exec_module
        return spec


def main(options: str, *arguments: str) -> None:
    """Run the script, or after "-m" the module, as Python would."""
    if "keras" in sys.modules:  # imported when Python starts, as by a .pth file
        replace_fit(sys.modules["keras"], **json.loads(options))
    else:
        sys.meta_path.insert(0, _AfterImport(json.loads(options)))
    try:
        if arguments[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            _run_file(list(arguments))
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = functools.partial(_show, sys.excepthook)  # the script may have set its own
        raise


def _run_file(arguments: list[str]) -> None:
    path = os.path.abspath(arguments[0])
    sys.path[0], sys.argv = os.path.dirname(os.path.realpath(path)), arguments
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __cached__=None, __builtins__=builtins)
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, vars(module))


def _show(show: Callable[..., None], kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Print an error with its traceback, from the script's first call on."""
    entry, ours = traceback, (_PACKAGE, "<string>", "<frozen runpy>")
    while entry is not None and entry.tb_frame.f_code.co_filename.startswith(ours):
        entry = entry.tb_next
    show(kind, error.with_traceback(entry or traceback), entry or traceback)


if __name__ == "__main__":
    main(*sys.argv[1:])
