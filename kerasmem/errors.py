"""Errors of kerasmem and their exit codes on the command line.

::

    KerasmemError                 1  kerasmem or the model failed
    ├── ModelError                1  the model itself cannot be built or run
    │   └── OutOfMemoryError      1  a real step ran out of the device's memory
    ├── DoesNotFitError           3  by the estimate, the model does not fit the device
    ├── UsageError                2  an argument is wrong (also a ValueError)
    │   └── MissingExtraError     2  an optional package is missing
    └── InputError                2  a file or object cannot be read
        ├── ModelFileError        2  not a readable model file
        │   ├── UntrustedModelError  2  reading it would run code from the file
        │   └── UnknownLayerError    2  it uses unknown classes
        └── DataError             2  a data file or its contents (also a ValueError)

A message names the file and the field, the problem and a fix.
"""

from __future__ import annotations

import copyreg
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any


class KerasmemError(Exception):
    """Base class of the errors of kerasmem."""

    exit_code: int = 1

    def __reduce__(self) -> Any:
        """Pickle the message, not the constructor's arguments. Worker processes send errors to their parent."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ModelError(KerasmemError):
    """The model cannot be built, traced or run with these settings."""


class OutOfMemoryError(ModelError):
    """A real step of the model ran out of the device's memory."""


class DoesNotFitError(KerasmemError):
    """By the estimate, the model does not fit the device."""

    exit_code = 3


class UsageError(KerasmemError, ValueError):
    """An argument is wrong or contradicts another."""

    exit_code = 2


class MissingExtraError(UsageError):
    """An optional package is missing. The message has the command to install it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional package: pip install 'kerasmem[{extra}]'")


class InputError(KerasmemError):
    """A file or object cannot be read, or has the wrong kind."""

    exit_code = 2


class ModelFileError(InputError):
    """A model file cannot be opened as a Keras model."""


class UntrustedModelError(ModelFileError):
    """Opening the model file would run code from it, or read other files."""


class UnknownLayerError(ModelFileError):
    """The model file uses classes or functions that neither Keras nor the user defines."""


class DataError(InputError, ValueError):
    """A data file or its contents cannot be used for training."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an exception's message, or its class name."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:300]


def check_format(what: str, data: object, version: int) -> None:
    """Check the `format_version` of a record.

    Args:
        what: the kind of record, for the message.
        data: the argument of `from_dict`.
        version: the supported `format_version`.

    Raises:
        InputError: If the data is not a mapping, or has another version.

    Examples:
        >>> check_format("report", {"format_version": 1}, 1)
    """
    actual = data.get("format_version") if isinstance(data, Mapping) else None
    if actual != version:
        raise InputError(f"{what}: format_version must be {version}; got {actual!r}")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of the caller outside of kerasmem, Keras and TensorFlow."""
    packages = [sys.modules[name] for name in ("kerasmem", "keras", "tensorflow") if name in sys.modules]
    folders = tuple(os.path.join(os.path.dirname(package.__file__ or ""), "") for package in packages)
    stack = traceback.extract_stack()[::-1]
    level = next((n for n, line in enumerate(stack, start=1) if not line.filename.startswith(folders)), 1)
    warnings.warn(message, category, stacklevel=level)
