"""Whether a batch can be divided with the same result."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from kerasmem.compat.keras_fit import is_under_strategy

INEXACT = "inexact"  # `micro_batches`: pieces are batches of their own if the step cannot be divided
MEAN, SUM = "mean", "sum"  # `loss_reduction`
_STEPS = {"train": ("train_step", "make_train_function"), "test": ("test_step", "make_test_function")}


def division_obstacle(model: Any, kind: str, loss_reduction: str | None) -> str | None:
    """Return the reason why a batch cannot be divided with the same result, or None.

    Args:
        model: compiled.
        kind: "train" or "test".
        loss_reduction: "mean" or "sum" if the user states how the model's own `compute_loss` reduces over rows.
    """
    if is_under_strategy(model):
        return f"it was made under {type(model.distribute_strategy).__name__}, which divides batches itself"
    for name in _STEPS[kind]:
        if not _is_keras_own(type(model), name):
            return f"{type(model).__name__} has its own {name}(), whose gradients and updates are not known"
    if loss_reduction is None and has_own_loss(model):
        return (
            f'{type(model).__name__} has its own compute_loss(); state how it reduces over rows: loss_reduction="mean" '
            'or loss_reduction="sum"'
        )
    return None


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
