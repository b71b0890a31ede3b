"""Running methods of Keras: `fit`, `evaluate` and `predict` around a callback's hook, and saving.

Also what a callback does to others of its list: `CSVLogger` chooses its columns in its first hook.

Keras tells a callback neither which call a hook comes from nor that a call raised. A traceback that somebody keeps
holds everything that the call made, so that no object's end tells it either. The stack of the thread that asks does:
a call is under way exactly if its frame is on that stack. Only that thread's own frames are read. Frames of another
thread change while they are read, and CPython crashes then (python/cpython#99110, #111363, #118680, #152355).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

_SAVERS = ("save", "save_weights", "export")


def calls_under_way(method: str) -> Iterator[dict[str, Any]]:
    """Yield the local variables of a Keras method's calls in this thread, the innermost first.

    Args:
        method: "fit", "evaluate" or "predict".

    Yields:
        Each call's local variables: its arguments, with the `CallbackList` that Keras made in place of `callbacks`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == method:
            variables = frame.f_locals
            # A CallbackList, and not the plain list in a user's own function `fit` around it.
            if hasattr(variables.get("callbacks"), "on_train_batch_begin"):
                yield dict(variables)
        frame = frame.f_back  # type: ignore[assignment]


def leave_out_of_validation(callbacks: Iterable[Any], names: Collection[str]) -> None:
    """Keep each `CSVLogger` from adding a column "val_…" for a name that validation never has.

    It does so in its first `on_epoch_end` for all names in `logs`, if the epoch had no validation. Its `keys` are
    the columns, and those that are set it leaves alone. Callbacks in between may add names, so they are set then.

    Args:
        callbacks: of one `fit`, in whose `on_epoch_end` this is called.
        names: in `logs`, such as "memory_peak_bytes".
    """
    import keras

    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger) and getattr(callback, "keys", ()) is None:
            callback.on_epoch_end = functools.partial(_first_row, callback, callback.on_epoch_end, names)


def _first_row(callback: Any, write: Callable[..., None], names: Collection[str], epoch: int, logs: Any = None) -> None:
    del callback.on_epoch_end  # the class's own stands behind it
    keys = sorted(logs or {})
    if keys and callback.keys is None and not any(key.startswith("val_") for key in keys):
        callback.keys = [*keys, *(f"val_{key}" for key in keys if key not in names)]
    write(epoch, logs)


class Saving(Protocol):
    """An observer of a model's saving."""

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that lasts as long as the saving."""


class _WatchedMethod:
    """Wraps a method of one model, and removes itself if it is called without watchers."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = weakref.ref(model), name
        self._own = vars(model).get(name)  # a method that somebody else put on this model
        self.watchers: weakref.WeakSet[Saving] = weakref.WeakSet()
        vars(model)[name] = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        model = self._model()
        method = self._own or getattr(type(model), self._name).__get__(model)
        with contextlib.ExitStack() as stack:
            for watcher in list(self.watchers):
                stack.enter_context(watcher.saving())
            if not self.watchers:
                self.remove()
            return method(*args, **options)

    def remove(self) -> None:
        """Leave the model as it was, unless somebody has put another method before this one."""
        model = self._model()
        if model is None or vars(model).get(self._name) is not self:
            return
        if self._own is None:
            del vars(model)[self._name]
        else:
            vars(model)[self._name] = self._own


def watch_saving(model: Any, watcher: Saving) -> None:
    """Enter `watcher.saving()` whenever the model's `save`, `save_weights` or `export` runs."""
    for name in _SAVERS:
        if hasattr(type(model), name):
            method = vars(model).get(name)
            watched = method if isinstance(method, _WatchedMethod) else _WatchedMethod(model, name)
            watched.watchers.add(watcher)


def stop_watching_saving(model: Any, watcher: Saving) -> None:
    """Undo `watch_saving`, if it was called."""
    for name in _SAVERS:
        method = vars(model).get(name)
        if isinstance(method, _WatchedMethod):
            method.watchers.discard(watcher)
            if not method.watchers:
                method.remove()
