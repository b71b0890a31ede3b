"""The process of `kerasmem run`: runs the user's script with `kerasmem.fit` in place of `model.fit`.

Started by `supervising`, as `python -m kerasmem.training.script OPTIONS SCRIPT ARGUMENTS…`, or with `-m MODULE`.
"""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.util
import inspect
import itertools
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from kerasmem.errors import UsageError, warn_user

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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
        if getattr(model.train_function, "is_kerasmem", False):  # `kerasmem.fit` calls it
            return keras_fit(model, *arguments, **named)
        from kerasmem.training.fitting import train
        from kerasmem.training.sources import make_source
        from kerasmem.training.steps.checks import check_fit
        from kerasmem.training.trainer import FitOptions

        bound = signature.bind(model, *arguments, **named).arguments
        del bound["self"]
        number = next(numbers)
        try:
            check_fit(model)
        except UsageError as error:
            _warn(f"fit {number} of the script runs as Keras has it: {error}")
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
    """Waits for the script to import Keras, since it may set environment variables before."""

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
    if "keras" in sys.modules:  # imported at the start of Python, as by a .pth file
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
    """Show an error of the script from the script's first call on."""
    each = traceback
    while each is not None and each.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<string>", "<frozen runpy>")):
        each = each.tb_next
    show(kind, error.with_traceback(each or traceback), each or traceback)


if __name__ == "__main__":
    main(*sys.argv[1:])
