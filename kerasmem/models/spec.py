"""Settings of an estimated training step, for Python, the command line, grids and subprocesses."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args

from kerasmem import checks
from kerasmem.checks import MethodName, Mode
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras
from kerasmem.models.compiling import TrainingSettings, training_settings
from kerasmem.models.data import DEFAULT_SIZE as DEFAULT_BATCH_SIZE
from kerasmem.models.data import read_batch
from kerasmem.models.inputs import (
    ModelInput,
    TargetSettings,
    data_inputs,
    model_inputs,
    normalise_input_shapes,
    read_targets,
)
from kerasmem.models.opening import OpenedModel, find_function, open_model, pack_model
from kerasmem.models.user_code import load_custom_objects, module_path_kept

F = TypeVar("F", bound=Callable[..., Any])


class StepSettings(TypedDict, total=False):
    """Types of the settings, for `**settings: Unpack[StepSettings]`."""

    batch_size: int | None
    method: MethodName
    optimizer: str | None
    loss: str | None
    dtype_policy: str | None
    jit_compile: bool | Literal["auto"]
    mode: Mode
    replicas: int
    kernels: Literal["onednn", "eigen"] | None
    threads: int | None
    input_shape: Any
    target_shape: Any
    target_dtype: str | None
    sample_weight: Any
    data: Any
    factory: str | None
    factory_args: Mapping[str, Any] | None
    custom_objects: Any
    trust: bool


class EstimateSettings(StepSettings, total=False):
    """Types of the settings including `device`, for functions without a `device` parameter."""

    device: str | int | None


@dataclass(frozen=True)
class StepSpec:
    """Validated settings of a model, its training step and the estimate.

    Attributes:
        model: a path, "module:function", a function or a Keras model; None if `factory` builds it.
        others: arguments of `kerasmem.estimate`.

    Raises:
        UsageError: If a setting is wrong.
    """

    model: Any
    batch_size: int | None = None
    method: str = "auto"
    optimizer: str | None = None
    loss: str | None = None
    dtype_policy: str | None = None
    device: str | int | None = None
    jit_compile: bool | str = "auto"
    mode: str = "train"
    replicas: int = 1
    kernels: str | None = None
    threads: int | None = None
    input_shape: Any = None
    target_shape: Any = None
    target_dtype: str | None = None
    sample_weight: Any = False
    data: Any = None
    factory: str | None = None
    factory_args: Mapping[str, Any] | None = None
    custom_objects: Any = None
    trust: bool = False

    def __post_init__(self) -> None:
        checks.choice("method", self.method, get_args(MethodName))
        checks.choice("mode", self.mode, get_args(Mode))
        checks.choice("jit_compile", self.jit_compile, (True, False, "auto"))
        checks.whole("replicas", self.replicas)
        checks.choice("kernels", self.kernels, (None, "onednn", "eigen"))
        if self.threads is not None:
            checks.whole("threads", self.threads)
        if self.batch_size is not None:
            checks.batch_size("batch_size", self.batch_size, self.method)
        if self.data is not None:
            self._read_data()

    def _read_data(self) -> None:
        """Replace the user's data by the shapes of one batch."""
        for name in ("input_shape", "target_shape", "target_dtype", "sample_weight"):
            if getattr(self, name) not in (None, False, [], ()):
                raise UsageError(f"data and {name} cannot be combined; the shapes come from the data")
        data = find_function(self.data, "--data") if isinstance(self.data, str) else self.data
        object.__setattr__(self, "data", read_batch(data, self.batch_size))

    @property
    def samples(self) -> int:
        """Samples in a batch of all replicas, unless the model fixes them."""
        if self.batch_size is not None:
            return self.batch_size
        return DEFAULT_BATCH_SIZE if self.data is None else int(self.data.size)

    @property
    def label(self) -> str:
        """Path of the model, or name of the model or its function, for messages."""
        if self.model is None:
            return str(self.factory)
        if isinstance(self.model, (str, os.PathLike)):
            return os.fspath(self.model)
        name = getattr(self.model, "name", type(self.model).__name__)
        return str(getattr(self.model, "__qualname__", name))

    def settings(self) -> dict[str, Any]:
        """Return all settings except the model, as keyword arguments."""
        return {name: getattr(self, name) for name in EstimateSettings.__annotations__}

    def targets(self) -> TargetSettings:
        """Return the user's settings of the targets."""
        return read_targets(self.target_shape, self.target_dtype, self.sample_weight)

    def inputs(self, model: Any) -> tuple[Any, list[ModelInput]]:
        """Return the structure of the model's inputs and the flat inputs, from the data or the user's shapes."""
        if self.data is not None:
            return data_inputs(model, self.data)
        return model_inputs(model, normalise_input_shapes(self.input_shape))

    def training(self) -> TrainingSettings:
        """Return the user's replacements of arguments of `compile`."""
        return training_settings(self.optimizer, self.loss, self.targets(), self.data)

    @contextlib.contextmanager
    def open_model(self) -> Iterator[OpenedModel]:
        """Open the model with these settings. The user's modules find others in the current folder until the end."""
        with module_path_kept():
            objects = self.custom_objects or {}
            with open_model(
                self.model,
                factory=self.factory,
                factory_args=self.factory_args,
                custom_objects=objects if isinstance(objects, Mapping) else load_custom_objects(objects),
                trust=self.trust,
                dtype_policy=self.dtype_policy,
                training=self.training(),
            ) as opened:
                yield opened

    def portable(self, **changes: Any) -> StepSpec:
        """Return settings for another process, with a `PackedModel` instead of a Keras model.

        Args:
            **changes: settings to change.

        Raises:
            NotRebuiltError: If the model has parts without a configuration.
        """
        spec = replace(self, **changes)
        return replace(spec, model=pack_model(spec.model)) if isinstance(spec.model, import_keras().Model) else spec


def shows_settings(*without: str) -> Callable[[F], F]:
    """Show the settings in `help` and `inspect.signature` of a function with `**settings`, and refuse other names.

    Args:
        *without: settings to omit.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = {name: one for name, one in signature.parameters.items() if name != "settings"}
        settings = [
            inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type)
            for item in fields(StepSpec)
            if item.name in EstimateSettings.__annotations__ and item.name not in (*own, *without)
        ]
        known = {*own, *(item.name for item in fields(StepSpec))}

        @functools.wraps(function)
        def checked(*arguments: Any, **named: Any) -> Any:
            checks.keywords(function.__name__, named, known)
            return function(*arguments, **named)

        checked.__signature__ = signature.replace(parameters=[*own.values(), *settings])  # type: ignore[attr-defined]
        return cast(F, checked)

    return decorate
