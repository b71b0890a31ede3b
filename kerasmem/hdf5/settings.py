"""Plain settings of a sequence, checked one by one."""

from __future__ import annotations

import glob
import itertools
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.columns import Part, read_part
from kerasmem.hdf5.layout import plain_name, shown
from kerasmem.hdf5.remote.access import RemoteAccess
from kerasmem.hdf5.remote.urls import is_broken_url, is_url, local_path

_LOCKING = (None, True, False, "best-effort")


@dataclass(frozen=True)
class Access:
    """What of a file may be read, and how it is opened.

    Args:
        allow_external: follow external links, external storage and virtual datasets, that is: read other files
            which this one names.
        allow_missing: accept datasets that were never written, or only in parts.
        locking: as h5py has it.
        remote: how files behind URLs are reached.
    """

    allow_external: bool = False
    allow_missing: bool = False
    locking: bool | str | None = None
    remote: RemoteAccess = field(default_factory=RemoteAccess)


def read_paths(path: Any, remote: RemoteAccess | None = None) -> tuple[str, ...]:
    """Return absolute paths: of one file, of those in a list, or of all that match a pattern, part-2 before part-10.

    Args:
        path: what was given; URLs stay as they are.
        remote: how URLs are reached, to find those that match a pattern.

    Raises:
        DataError: no file matches.
        UsageError: these are no paths, or one is named twice.
    """
    if isinstance(path, Sequence) and not isinstance(path, (str, bytes)):
        paths = [read_place(one) for one in path]
        if not paths:
            raise UsageError("path: the list of files is empty")
        if len(set(paths)) < len(paths):
            twice = next(one for one in paths if paths.count(one) > 1)
            raise UsageError(f"path: {shown(twice)} is named more than once; its rows would come more than once")
        return tuple(paths)
    one = read_place(path)
    if is_url(one):
        from kerasmem.hdf5.remote.listing import expand, is_pattern

        return tuple(sorted(expand(one, remote or RemoteAccess()), key=natural_order)) if is_pattern(one) else (one,)
    if glob.has_magic(one) and not os.path.exists(one):
        found = [name for name in glob.glob(one, recursive=True) if os.path.isfile(name)]
        if not found:
            raise DataError(
                f"{shown(one)}: no file matches this pattern; give the path of a file, a list of paths, "
                "or a pattern such as 'data/*.h5' that some match ('**' stands for folders within folders)"
            )
        return tuple(sorted(found, key=natural_order))
    return (one,)


def read_files(path: Any, remote: RemoteAccess | None = None) -> tuple[str | dict[str, str], ...]:
    """Return the files as `read_paths` does; for a dict of dataset name to files a dict of name to file for each.

    Raises:
        DataError: no file matches.
        UsageError: these are no paths, or datasets have different numbers of files.
    """
    if not isinstance(path, Mapping):
        return read_paths(path, remote)
    found = {plain_name(str(name)): read_paths(files, remote) for name, files in path.items()}
    counts = {name: len(files) for name, files in found.items()}
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{count:,} for {shown(name)}" for name, count in counts.items()) or "none"
        raise UsageError(f"path: each dataset must have as many files as the others, and there are {listed}")
    return tuple(dict(zip(found, files, strict=True)) for files in zip(*found.values(), strict=True))


def all_files(paths: Iterable[str | Mapping[str, str]]) -> tuple[str, ...]:
    """Return every file once, also those of datasets that lie beside one another in different files."""
    each = (path.values() if isinstance(path, Mapping) else (path,) for path in paths)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(each)))


def natural_order(path: str) -> tuple[list[tuple[int, str]], str]:
    """Return what sorts names as people count: part-2 before part-10."""
    pieces = re.split(r"([0-9]+)", path)  # text and digits in turn, so that like is compared with like
    numbered = [(int(piece), "") if at % 2 else (0, piece) for at, piece in enumerate(pieces)]
    return numbered, path


def read_locking(value: Any) -> bool | str | None:
    """Return how a file is to be locked."""
    if not any(value is known or (isinstance(value, str) and value == known) for known in _LOCKING):
        raise UsageError(f"locking: {value!r} is none of None, True, False and 'best-effort'")
    return value


def read_path(path: Any) -> str:
    """Return an absolute path, so that worker processes and later `chdir`s find the same file."""
    try:
        text = os.fsdecode(os.fspath(path))
    except TypeError:
        kind = type(path).__name__
        raise UsageError(f"path: give the path of an HDF5 file, a list or a pattern of paths, not {kind}") from None
    if not text or "\0" in text:
        raise UsageError(f"path: {text!r} is not a path")
    return os.path.abspath(os.path.expanduser(text))


def read_place(path: Any) -> str:
    """Return a URL as it is, and of anything else the absolute path; `file://` names a file of this machine."""
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if isinstance(text, str):
            if is_broken_url(text) and not os.path.exists(text):
                raise UsageError(f"path: {shown(text)} has lost a slash, as pathlib does with URLs; give it as text")
            if is_url(text) and "\0" not in text:
                return text
            return read_path(local_path(text))
    return read_path(path)


def read_size(value: Any) -> Any:
    """Return a size with NumPy's integers made plain; whether it is one is for `parse_size` to say."""
    return int(value) if isinstance(value, np.integer) else value


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
