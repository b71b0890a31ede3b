"""What `kerasmem.estimate` was given, checked once, and handed on to each step of the estimate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, get_args

from kerasmem import checks
from kerasmem.checks import Method, Mode
from kerasmem.models.request import ModelRequest, request_for

METHODS, MODES = get_args(Method), get_args(Mode)
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class EstimateArguments:
    """The arguments of `kerasmem.estimate`, validated.

    Raises:
        UsageError: one of them is wrong.
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
    custom_objects: Mapping[str, Any] | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        checks.choice("method", self.method, METHODS)
        checks.choice("mode", self.mode, MODES)
        checks.choice("jit_compile", self.jit_compile, (True, False, "auto"))
        checks.whole("replicas", self.replicas)
        checks.batch_size("batch_size", self.batch_size, self.method)

    def opening(self) -> dict[str, Any]:
        """Return the arguments that say how the model is opened."""
        names = ("factory", "factory_args", "custom_objects", "trust", "dtype_policy")
        return {name: getattr(self, name) for name in names}

    def request(self, batch_size: int, jit_compile: bool | str) -> AbstractContextManager[ModelRequest]:
        """Return the model and its step in words for another process.

        Args:
            batch_size: samples in a batch.
            jit_compile: True, False or "auto".
        """
        return request_for(
            self.model, **self.opening(), input_shape=self.input_shape, target_shape=self.target_shape,
            target_dtype=self.target_dtype, optimizer=self.optimizer, loss=self.loss, batch_size=batch_size,
            mode=self.mode, jit_compile=jit_compile,
        )  # fmt: skip
