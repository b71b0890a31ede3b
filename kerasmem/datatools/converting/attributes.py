"""Attributes that go along when a file is written anew."""

from __future__ import annotations

from collections.abc import Sequence

import h5py
import numpy as np

from kerasmem.hdf5.links import DAMAGED, encoded

_MOST_BYTES = 60_000  # of one; HDF5 keeps no larger ones beside a dataset


def copy_attributes(source: str, output: str, names: Sequence[tuple[str, str]]) -> None:
    """Copy attributes that are numbers or texts; those that point to other objects would point nowhere."""
    with h5py.File(source, "r") as one, h5py.File(output, "r+") as other:
        for name, written in [("/", "/"), *names]:
            try:
                for key, value in one[encoded(name)].attrs.items():
                    kind = one[encoded(name)].attrs.get_id(key).dtype
                    plain = kind.kind in "iufbSU" or h5py.check_string_dtype(kind) is not None
                    if plain and key not in other[written].attrs and np.asarray(value).nbytes <= _MOST_BYTES:
                        other[written].attrs[key] = value
            except DAMAGED:
                continue
