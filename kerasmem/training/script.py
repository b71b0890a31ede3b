"""The process of `kerasmem run`: runs the user's script, with each `model.fit` in it made one that can be gone on with.

Started by `supervising`, as `python -m kerasmem.training.script SCRIPT ARGUMENTS…`, or `-m MODULE ARGUMENTS…`.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib.abc
import importlib.util
import inspect
import os
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from kerasmem import files
from kerasmem.compat.keras_fit import new_epoch_iterator
from kerasmem.errors import UsageError
from kerasmem.training.run_folder import VARIABLE, RunFolder, ScriptPosition, Supervised

if TYPE_CHECKING:
    from kerasmem.training.fitting import FitOptions
    from kerasmem.training.sources import Source

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Session:
    """The calls of `fit` of one run of the script, numbered from 1.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.folder.note(ScriptPosition())
        self._settings = folder.read("settings")
        self._count = 0
        self.keras_fit: Any = None  # of `keras.Model`, before it was replaced
        self.is_inside = False  # a call of `fit` of the script's: those that we make in it are none
        self._to_pass_over: list[tuple[Any, Callable[[], None]]] = []  # data of calls that were over, and how to

    def fit(self, model: Any, arguments: dict[str, Any], options: FitOptions | None = None) -> Any:
        """Train as `fit` would, going on where an earlier run of the script was.

        Args:
            model: to be trained.
            arguments: of `model.fit`, by name.
            options: of `kerasmem.fit`; None where the script calls `model.fit`.
        """
        from kerasmem.training.dataset_sources import make_source
        from kerasmem.training.fitting import FitOptions, train
        from kerasmem.training.steps.checks import check_model

        self._count += 1
        given, arguments = dict(arguments), dict(arguments)
        from_script = 3 if options is None else 4  # `kerasmem.fit` stands behind a wrapper
        self.is_inside = True
        try:
            check_model(model)
            source = make_source(arguments)
        except UsageError as error:
            if options is not None and options.checkpoint is not None:
                raise
            warnings.warn(
                f"kerasmem run: fit number {self._count} of the script cannot be gone on with, and starts over if "
                f"the script dies in it: {error}",
                RuntimeWarning,
                stacklevel=from_script,
            )
            return self.keras_fit(model, **given) if options is None else train(model, given, options)
        else:
            if (difference := source.difference(model.steps_per_execution)) is not None:
                warnings.warn(
                    f"kerasmem run: fit number {self._count} of the script is not bit for bit what python gives: "
                    f"{difference}",
                    RuntimeWarning,
                    stacklevel=from_script,
                )
            return self._train(model, given.get("x"), arguments, source, options or FitOptions())
        finally:
            self.is_inside = False

    def _train(self, model: Any, data: Any, arguments: dict[str, Any], source: Source, options: FitOptions) -> Any:
        from kerasmem.diagnosis.explaining import explain_oom
        from kerasmem.training.fitting import finished, train

        number, end = self._count, os.path.join(self.folder.path, f"fit-{self._count}")
        history = finished(model, source, end)
        if history is not None:
            if source.kind in ("stream", "dataset"):
                epochs = len(history.epoch)
                again = functools.partial(_pass_over, model, data, arguments.get("steps_per_epoch"), source, epochs)
                self._to_pass_over.append((data, again))
            return history
        for other, pass_over in self._to_pass_over:
            if other is data:
                pass_over()
        self._to_pass_over = [each for each in self._to_pass_over if each[0] is not data]
        chosen = dataclasses.replace(
            options,
            micro_batches=options.micro_batches or self._settings.get("micro_batches"),
            save_freq=options.save_freq or self._settings.get("save_freq"),
            checkpoint=options.checkpoint or end,
            keep=True,
        )
        try:
            history = train(model, arguments, chosen, source=source, supervisor=Supervised(self.folder, number))
        except Exception as error:
            found = explain_oom(error)
            if not found.out_of_memory:
                raise
            self.folder.die({"diagnosis": found.to_dict(), "certain": False})
        if options.checkpoint is not None:  # the script's own; the end of this fit is for a later run of the script
            saved = files.follow("checkpoint", options.checkpoint)
            with files.open_kept(saved) as file, files.replacing(end) as copy:
                shutil.copyfileobj(file, copy)
            if not options.keep:
                os.unlink(saved)
        self.folder.note(ScriptPosition(number))
        return history


def _pass_over(model: Any, data: Any, steps: int | None, source: Source, epochs: int) -> None:
    """Bring data to where a `fit` that is over left it, for a later one on the same data."""
    source.pass_over(epochs, new_epoch_iterator(model, data, steps), model.steps_per_execution)


SESSION: Session | None = None


def route_fit(session: Session, keras: ModuleType) -> None:
    """Have `fit` of every Keras model go through the session."""
    session.keras_fit = original = keras.Model.fit
    signature = inspect.signature(original)

    def fit(self: Any, *arguments: Any, **named: Any) -> Any:
        if session.is_inside:
            return original(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named).arguments
        bound.pop("self")
        return session.fit(self, dict(bound))

    fit.__doc__ = original.__doc__
    keras.Model.fit = fit


class _AfterImport(importlib.abc.MetaPathFinder):
    """Waits for the script to import Keras: not sooner, for it may set variables of the environment before."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                route_fit(self._session, module)

            spec.loader.exec_module = exec_module
        return spec


def main(arguments: list[str]) -> None:
    """Run the script, or after "-m" the module, as Python would."""
    global SESSION
    SESSION = Session(RunFolder(os.environ[VARIABLE]))
    sys.modules["kerasmem.training.script"] = sys.modules[__name__]  # one session, whoever imports this
    if "keras" in sys.modules:  # Python was told to import it before it runs anything
        route_fit(SESSION, sys.modules["keras"])
    else:
        sys.meta_path.insert(0, _AfterImport(SESSION))
    try:
        if arguments[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            _run_file(arguments)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = functools.partial(_show_error, sys.excepthook)  # the script may have set its own
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


def _show_error(show: Callable[..., None], kind: type[BaseException], error: BaseException, _: Any) -> None:
    """Show an error of the script without the calls of ours that it went through."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each.__traceback__ = _without_own(each.__traceback__)
        each = each.__cause__ or each.__context__
    show(kind, error, error.__traceback__)


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the calls in this package, unless it ends in one."""
    entries: list[TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    is_own = [each.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<frozen runpy>")) for each in entries]
    first = is_own.index(False) if False in is_own else 0
    if is_own and is_own[-1]:
        return entries[first]
    kept: TracebackType | None = None
    for entry, own in zip(reversed(entries), reversed(is_own), strict=True):
        if not own:
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


if __name__ == "__main__":
    main(sys.argv[1:])
