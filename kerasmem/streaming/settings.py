"""Plain settings of a sequence, checked one by one."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.streaming.columns import Part, read_part


def read_path(path: Any) -> str:
    """Return an absolute path, so that worker processes and later `chdir`s find the same file."""
    try:
        text = os.fsdecode(os.fspath(path))
    except TypeError:
        raise UsageError(f"path: give the path of an HDF5 file, not {type(path).__name__}") from None
    if not text or "\0" in text:
        raise UsageError(f"path: {text!r} is not a path")
    return os.path.abspath(os.path.expanduser(text))


def read_whole(setting: str, value: Any, least: int) -> int:
    """Return a whole number that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise UsageError(f"{setting}: {value!r} is not a whole number")
    if value < least:
        raise UsageError(f"{setting}: {value} is too small; it must be {least} or more")
    return int(value)


def read_size(value: Any) -> Any:
    """Return a size with NumPy's integers made plain; whether it is one is for `parse_size` to say."""
    return int(value) if isinstance(value, np.integer) else value


def read_flag(setting: str, value: Any) -> bool:
    """Return True or False, nothing that merely looks like it."""
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{setting}: {value!r} is neither True nor False")
    return bool(value)


def read_parts(x: Any, y: Any, sample_weight: Any) -> tuple[Part, ...]:
    """Return x, y and sample_weight as far as they are given."""
    if x is None:
        raise UsageError("x: name the dataset of the features")
    if y is None and sample_weight is not None:
        raise UsageError("sample_weight: Keras takes weights only together with y")
    given = (("x", x), ("y", y), ("sample_weight", sample_weight))
    return tuple(read_part(role, value) for role, value in given if value is not None)


def check_transform(transform: Any, processes: bool) -> None:
    """Refuse a transform that cannot be called, or not be sent to worker processes."""
    if transform is None:
        return
    if not callable(transform):
        raise UsageError(f"transform: {transform!r} cannot be called")
    if processes:
        try:
            pickle.dumps(transform)
        except Exception as error:
            raise UsageError(
                "transform: worker processes need one that can be pickled: define it with `def` at the top "
                f"of a module, or use threads (use_multiprocessing=False). {type(error).__name__}: {error}"
            ) from error
