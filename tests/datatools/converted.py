"""Helpers for tests of conversions: content of files, and leftover files."""

from __future__ import annotations

import os

import h5py
import numpy as np

from kerasmem import H5ChunkSequence


def content(path):
    """Return all datasets of a file by name."""
    result = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: result.update({name: item[...]}) if isinstance(item, h5py.Dataset) else None)
    return result


def rows_of(data, *names):
    """Return the rows as a sorted list of tuples, to compare data in different order."""
    columns = [np.asarray(data[name]).reshape(len(data[name]), -1) for name in names]
    return sorted(map(tuple, np.concatenate([column.astype("f8") for column in columns], axis=1).tolist()))


def streamed(path, x="x", y="y", **settings):
    """Return the arrays that `H5ChunkSequence` delivers in file order."""
    with H5ChunkSequence(path, x, y, shuffle=False, batch_size=7, dtype="stored", **settings) as sequence:
        batches = [sequence[place] for place in range(len(sequence))]
    return tuple(np.concatenate(part) for part in zip(*batches, strict=True))


def left_in(folder, *known):
    """Return the names in a folder except the known ones."""
    return sorted(set(os.listdir(folder)) - {os.path.basename(str(name)) for name in known})


def write_netcdf(path, values, coordinates, **attributes):
    """Write a variable "t" as netCDF-4 does, with a dimension scale for each axis."""
    with h5py.File(path, "w", libver="latest", track_order=True) as file:
        data = file.create_dataset("t", data=values)
        for axis, (name, size) in enumerate(zip(coordinates, values.shape, strict=True)):
            file[name] = np.arange(size)
            file[name].make_scale(name)
            data.dims[axis].attach_scale(file[name])
        for name, value in attributes.items():
            data.attrs[name] = value
    return path
