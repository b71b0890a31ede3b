"""Every error that kerasmem raises on purpose, with the exit code the command line gives it.

::

    KerasmemError                 1  kerasmem or the model failed
    ├── ModelError                1  the model itself cannot be built or run
    │   └── OutOfMemoryError      1  a real step ran out of the device's memory
    ├── DoesNotFitError           3  the estimate says that the device has no room for it
    ├── UsageError                2  the call is wrong (also a ValueError)
    │   └── MissingExtraError     2  an optional package is needed; the message has the command
    └── InputError                2  a file or object cannot be read as what it should be
        ├── ModelFileError        2  not a readable model file
        │   ├── UntrustedModelError  2  reading it would run code from the file
        │   └── UnknownLayerError    2  it uses classes that nobody has named
        └── DataError             2  a data file or its contents (also a ValueError)

A message says what is wrong, names the file and the field, and ends with the way out.
"""

from __future__ import annotations

import copyreg
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

_INTERNAL = ("kerasmem", "keras", "tensorflow")  # packages whose lines no warning points at


class KerasmemError(Exception):
    """Root of every error kerasmem raises on purpose."""

    exit_code: int = 1

    def __reduce__(self) -> Any:
        """Be pickled as the message, whatever the constructor takes: workers send errors to who asked them."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ModelError(KerasmemError):
    """The model cannot be built, traced or run with the settings given."""


class OutOfMemoryError(ModelError):
    """A real step of the model ran out of the device's memory."""


class DoesNotFitError(KerasmemError):
    """By the estimate the device has no room for the model."""

    exit_code = 3


class UsageError(KerasmemError, ValueError):
    """An argument is wrong or contradicts another."""

    exit_code = 2


class MissingExtraError(UsageError):
    """An optional package is missing; the message carries the command that installs it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional package: pip install 'kerasmem[{extra}]'")


class InputError(KerasmemError):
    """A file or object given as input cannot be read as what it should be."""

    exit_code = 2


class ModelFileError(InputError):
    """A model file cannot be opened as a Keras model."""


class UntrustedModelError(ModelFileError):
    """Opening the model would run code, or read other files, named in the model file."""


class UnknownLayerError(ModelFileError):
    """The model file names classes or functions that are neither Keras's nor registered."""


class DataError(InputError, ValueError):
    """A data file, or what it contains, cannot be used for training."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an exception's message, or its class if there is none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:300]


def check_format(what: str, data: object, version: int) -> None:
    """Refuse what another version wrote, or what is no record at all, before its fields are read.

    Args:
        what: the kind of record, for the message.
        data: what `from_dict` was given.
        version: the `format_version` that is read here.

    Raises:
        InputError: `data` is no mapping of that version.

    Examples:
        >>> check_format("report", {"format_version": 1}, 1)
    """
    found = data.get("format_version") if isinstance(data, Mapping) else None
    if found != version:
        raise InputError(f"{what}: format_version is {found!r}, this kerasmem reads {version}")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first calling line outside of kerasmem, Keras and TensorFlow."""
    packages = [sys.modules[name] for name in _INTERNAL if name in sys.modules]
    folders = tuple(os.path.join(os.path.dirname(each.__file__ or ""), "") for each in packages)
    stack = traceback.extract_stack()[::-1]
    level = next((n for n, line in enumerate(stack, start=1) if not line.filename.startswith(folders)), 1)
    warnings.warn(message, category, stacklevel=level)
