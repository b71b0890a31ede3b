"""The process of `kerasmem run`: runs the user's script, with each `model.fit` in it made one that can be gone on with.

Started by `supervising`, as `python -m kerasmem.training.script SCRIPT ARGUMENTS…`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.training.progress import FOLDER, RAN_OUT, Record, Standing, read_json, write_json


class Session:
    """The calls of `fit` of one run of the script, numbered from 1.

    Args:
        folder: where the run keeps its checkpoints.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.record = Record(folder)
        self.record.write(Standing(0, 0, 0, 0, 0, in_fit=False))
        self._settings = read_json(folder, "settings")
        self._count = 0
        self._within = False
        self._behind: list[tuple[Any, Callable[[], None]]] = []  # data of calls that were over, and what they did to it

    def covers(self) -> bool:
        """Return whether a call of `fit` is one of the script's, not one that we make."""
        return not self._within

    def fit(self, model: Any, original: Any, arguments: dict[str, Any], *, micro_batches: int | None = None) -> Any:
        """Train as `fit` would, going on where an earlier run of the script was."""
        from kerasmem.training.fitting import make_source
        from kerasmem.training.steps.checks import check_model

        self._count += 1
        number = self._count
        with self._inside():
            arguments = dict(arguments)
            try:
                check_model(model)
                source = make_source(arguments)
            except UsageError as error:
                warnings.warn(
                    f"kerasmem run: fit number {number} of the script cannot be gone on with, and begins anew if the "
                    f"script dies in it: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return original(model, **arguments)
            return self._train(number, model, arguments, source, micro_batches)

    def _train(self, number: int, model: Any, arguments: dict[str, Any], source: Any, micro_batches: int | None) -> Any:
        from kerasmem.diagnosis.explaining import explain_oom
        from kerasmem.training.fitting import finished, pass_again, train

        path = os.path.join(self.folder, f"fit-{number}")
        history = finished(model, source, path)
        if history is not None:
            if source.kind in ("stream", "dataset"):
                epochs = len(history.epoch)
                self._behind.append((arguments["x"], functools.partial(pass_again, model, arguments, source, epochs)))
            return history
        for data, again in self._behind:
            if data is arguments.get("x"):
                again()
        self._behind = [each for each in self._behind if each[0] is not arguments.get("x")]
        progress = _Progress(self, number, read_json(self.folder, "plan"))
        try:
            history = train(
                model,
                arguments,
                micro_batches=micro_batches or self._settings.get("micro_batches"),
                path=path,
                every=self._settings.get("every", 100),
                keep=True,
                isolated=False,
                source=source,
                progress=progress,
            )
        except Exception as error:
            found = explain_oom(error)
            if not found.out_of_memory:
                raise
            self.die({"diagnosis": found.to_dict(), "certain": False})
        self.record.write(Standing(number, 0, 0, 0, 0, in_fit=False))
        return history

    def die(self, failure: dict[str, Any]) -> None:
        """End the process at once, saving nothing that it holds."""
        write_json(self.folder, "failure", failure)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(RAN_OUT)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._within = True
        try:
            yield
        finally:
            self._within = False


class _Progress:
    """Told of each step of one `fit`."""

    def __init__(self, session: Session, number: int, plan: dict[str, Any]) -> None:
        self._session, self._number = session, number
        self.size, self.test_size = plan.get(f"{number} train"), plan.get(f"{number} test")

    def before(self, run: Any, driver: Any, rows: int) -> None:
        """Note the step that comes."""
        standing = Standing(self._number, run.last.epoch, run.last.done, rows, driver.size or 0, in_fit=True)
        self._session.record.write(standing)

    def die(self, failure: Any, kind: str, rows: int, size: int) -> None:
        """A step on so many rows, in pieces of `size`, cost the process."""
        told = {"diagnosis": failure.diagnosis.to_dict(), "certain": failure.is_certain}
        self._session.die({**told, "kind": kind, "rows": rows, "size": min(rows, size)})


SESSION: Session | None = None


def routed(session: Session, keras: ModuleType) -> None:
    """Have `fit` of every Keras model go through the session."""
    original = keras.Model.fit
    signature = inspect.signature(original)

    def fit(self: Any, *arguments: Any, **named: Any) -> Any:
        if not session.covers():
            return original(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named).arguments
        bound.pop("self")
        return session.fit(self, original, dict(bound))

    fit.__doc__ = original.__doc__
    keras.Model.fit = fit


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Waits for the script to import Keras: not sooner, for it may set variables of the environment before."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loader: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        routed(self._session, module)


def main(arguments: list[str]) -> None:
    """Run the script as Python would."""
    global SESSION
    SESSION = Session(os.environ[FOLDER])
    sys.modules["kerasmem.training.script"] = sys.modules[__name__]  # one session, whoever imports this
    sys.meta_path.insert(0, _AfterImport(SESSION))
    path, sys.argv = arguments[0], list(arguments)
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
