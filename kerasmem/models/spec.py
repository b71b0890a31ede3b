"""The settings of an estimated training step: one object for Python, the command line, grids and child processes."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, TypeVar, get_args

from kerasmem import checks
from kerasmem.checks import MethodName, Mode
from kerasmem.models.backend import import_keras
from kerasmem.models.inputs import GivenShape, GivenTargets, given_targets, normalise_input_shapes
from kerasmem.models.opening import OpenedModel, open_model, pack_model
from kerasmem.models.vocabulary import load_custom_objects

DEFAULT_BATCH_SIZE = 32
F = TypeVar("F", bound=Callable[..., Any])


class StepSettings(TypedDict, total=False):
    """Types of settings, for functions that take them as `**settings: Unpack[StepSettings]`."""

    batch_size: int
    method: MethodName
    optimizer: str | None
    loss: str | None
    dtype_policy: str | None
    jit_compile: bool | Literal["auto"]
    mode: Mode
    replicas: int
    input_shape: Any
    target_shape: Any
    target_dtype: str | None
    factory: str | None
    factory_args: Mapping[str, Any] | None
    custom_objects: Any
    trust: bool


class EstimateSettings(StepSettings, total=False):
    """All settings of `StepSpec`, for functions that do not have `device` as a parameter of their own."""

    device: str | int | None


@dataclass(frozen=True)
class StepSpec:
    """A model, its training step and how to estimate it: every setting, validated.

    Attributes:
        model: a path, "module:function", a function, a Keras model; None if `factory` alone builds it.
        others: as for `kerasmem.estimate`.

    Raises:
        UsageError: If a setting is wrong.
    """

    model: Any
    batch_size: int = DEFAULT_BATCH_SIZE
    method: str = "auto"
    optimizer: str | None = None
    loss: str | None = None
    dtype_policy: str | None = None
    device: str | int | None = None
    jit_compile: bool | str = "auto"
    mode: str = "train"
    replicas: int = 1
    input_shape: Any = None
    target_shape: Any = None
    target_dtype: str | None = None
    factory: str | None = None
    factory_args: Mapping[str, Any] | None = None
    custom_objects: Any = None
    trust: bool = False

    def __post_init__(self) -> None:
        checks.choice("method", self.method, get_args(MethodName))
        checks.choice("mode", self.mode, get_args(Mode))
        checks.choice("jit_compile", self.jit_compile, (True, False, "auto"))
        checks.whole("replicas", self.replicas)
        checks.batch_size("batch_size", self.batch_size, self.method)

    @property
    def label(self) -> str:
        """The model's path or the name of the function that builds it, for messages."""
        if self.model is None:
            return str(self.factory)
        if isinstance(self.model, (str, os.PathLike)):
            return os.fspath(self.model)
        name = getattr(self.model, "name", type(self.model).__name__)
        return str(getattr(self.model, "__qualname__", name))

    def settings(self) -> dict[str, Any]:
        """Return all settings but the model, as functions take them that estimate."""
        return {name: getattr(self, name) for name in EstimateSettings.__annotations__}

    def input_shapes(self) -> dict[str, GivenShape]:
        """Return the shapes of the inputs by name ("" for the only one)."""
        return normalise_input_shapes(self.input_shape)

    def targets(self) -> GivenTargets:
        """Return the settings of the targets."""
        return given_targets(self.target_shape, self.target_dtype)

    def opened(self, *, shapes_only: bool = False) -> contextlib.AbstractContextManager[OpenedModel]:
        """Open the model as `open_model` does, for as long as the context lasts."""
        objects = self.custom_objects or {}
        return open_model(
            self.model,
            factory=self.factory,
            factory_args=self.factory_args,
            custom_objects=objects if isinstance(objects, Mapping) else load_custom_objects(objects),
            trust=self.trust,
            dtype_policy=self.dtype_policy,
            shapes_only=shapes_only,
        )

    def portable(self, **changes: Any) -> StepSpec:
        """Return the step for another process: of a Keras model only its configuration, without the weights.

        Args:
            **changes: settings that differ.

        Raises:
            UsageError: If the model has no configuration.
        """
        spec = replace(self, **changes)
        return replace(spec, model=pack_model(spec.model)) if isinstance(spec.model, import_keras().Model) else spec


def shows_settings(*without: str) -> Callable[[F], F]:
    """Let `help` and `inspect.signature` list the settings of a function that takes `**settings`.

    Args:
        *without: settings that the function does not take.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = {name: each for name, each in signature.parameters.items() if name != "settings"}
        settings = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(StepSpec)
            if each.name in EstimateSettings.__annotations__ and each.name not in (*own, *without)
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own.values(), *settings]
        )
        return function

    return decorate
