"""Whether a batch can be divided with the same result: proven of the step, or not done unless asked for."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from kerasmem.compat.keras_fit import is_under_strategy
from kerasmem.training.steps.row_sums import MEAN, UNKNOWN, loss_over_rows

INEXACT = "inexact"  # `micro_batches`: pieces are batches of their own where the step cannot be divided
_STEPS = {"train": ("train_step", "make_train_function"), "test": ("test_step", "make_test_function")}


class Division:
    """How the batches of a model are divided; found out when it is first asked.

    Args:
        model: compiled and built.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._over_rows: str | None = None

    def obstacle(self, kind: str, batch: Any) -> str | None:
        """Return why a batch cannot be divided with the same result, in words; None where it can.

        Args:
            kind: "train" or "test".
            batch: one that the step takes; only its shapes count.
        """
        model = self._model
        if is_under_strategy(model):
            return f"it was made under {type(model.distribute_strategy).__name__}, which divides batches itself"
        for name in _STEPS[kind]:
            if not _is_keras_own(type(model), name):
                return f"{type(model).__name__} has its own {name}(), whose gradients and updates are not known"
        if self.over_rows(batch) == UNKNOWN:
            return f"{type(model).__name__} has its own compute_loss(), which is not provably a mean or a sum over rows"
        return None

    def over_rows(self, batch: Any) -> str:
        """Return whether the loss of a batch is the "mean" or the "sum" of what its rows give, or "unknown"."""
        if not has_own_loss(self._model):
            return MEAN
        if self._over_rows is None:
            self._over_rows = loss_over_rows(self._model, batch)
        return self._over_rows


def has_own_loss(model: Any) -> bool:
    """Return whether the model's class computes its loss in its own way."""
    return not _is_keras_own(type(model), "compute_loss")


def _is_keras_own(cls: type, name: str) -> bool:
    """Return whether a method is Keras's, or does nothing but call Keras's."""
    for each in cls.__mro__:
        method = vars(each).get(name)
        if method is None:
            continue
        if each.__module__.split(".")[0] == "keras":
            return True
        if not _only_calls_super(method, name):
            return False
    return True


class _OnlySuper:
    """Methods that do nothing but call the one that they replace, as Python compiles them."""

    def returned(self, data: Any) -> Any:
        return super().STEP(data)  # type: ignore[misc]

    def kept(self, data: Any) -> Any:
        logs = super().STEP(data)  # type: ignore[misc]
        return logs  # noqa: RET504

    def forced(self, force: Any = False) -> Any:
        return super().STEP(force)  # type: ignore[misc]

    def forced_by_name(self, force: Any = False) -> Any:
        return super().STEP(force=force)  # type: ignore[misc]


def _only_calls_super(method: Any, name: str) -> bool:
    code = getattr(method, "__code__", None)
    return isinstance(code, CodeType) and any(_alike(code, each, name) for each in _templates())


def _templates() -> list[CodeType]:
    methods: list[Callable[..., Any]] = [
        _OnlySuper.returned, _OnlySuper.kept, _OnlySuper.forced, _OnlySuper.forced_by_name,
    ]  # fmt: skip
    return [each.__code__ for each in methods]


def _alike(code: CodeType, template: CodeType, name: str) -> bool:
    names = tuple(name if each == "STEP" else each for each in template.co_names)
    docless = [each for each in code.co_consts if not isinstance(each, str)]
    return (
        code.co_code == template.co_code
        and code.co_names == names
        and code.co_freevars == template.co_freevars
        and code.co_argcount == template.co_argcount
        and [each for each in docless if each is not None]
        == [each for each in template.co_consts if each is not None and not isinstance(each, str)]
    )
