"""HDF5 files with links, external storage and virtual datasets that lead to other files."""

from __future__ import annotations

import io
import random
from pathlib import Path

import h5py
import numpy as np
from cases import SECRET, Case
from hdf5_targets import COMMANDS, Hdf5Target
from mutation import mutate

_FILES = ("../private/secret.txt", "../private/secret.h5", "../private/pipe", "/proc/self/cwd/../private/secret.txt",
          "/proc/self/cwd/../private/secret.h5", "x.h5", "./x.h5", ".", "", "../private/secret.%b", "missing",
          "/dev/zero",
          "../private/../private/secret.h5", "raw.bin", "/proc/self/fd/0", "../private")  # fmt: skip
_OWN = {"raw.bin": bytes(range(256)) * 4}  # beside the file, and as little to be read without being asked for
_PLACES = ("x", "y", "y_class_names", "x_class_names", "X/data", "X/indices", "X/indptr", "obs/kind/codes",
           "obs/kind/categories", "train/x", "train/y", "layer_names", "model_weights")  # fmt: skip
_TARGETS = ("secret", "/group/secret", "/", "/group", "x", "/own/a", "own/b", "/x", "..", "/linked/secret")
_KINDS = ("u1", "u1", "S16", "<i4", "<f4")


class LinksTarget(Hdf5Target):
    """Files that refer to other files."""

    name = "links"
    waiting = 10.0

    def prepare(self, folder: Path) -> None:
        """Add an HDF5 file that may not be read."""
        super().prepare(folder)
        with h5py.File(folder / "private" / "secret.h5", "w") as file:
            file["secret"] = np.frombuffer(SECRET * 20, "u1")
            file["group/secret"] = np.array([SECRET] * 20)
            file["group"].attrs["class_names"] = [SECRET.decode()] * 4

    def make_seeds(self) -> dict[str, bytes]:
        """Return nothing, because each case is a new file."""
        return {}

    def make(self, draw: random.Random) -> Case:
        """Return a file with some names that lead to other files."""
        memory = io.BytesIO()
        with h5py.File(memory, "w", libver=draw.choice((None, "latest"))) as file:
            file["own/a"], file["own/b"] = np.arange(40, dtype="u1").reshape(20, 2), np.arange(20) % 4
            if draw.random() < 0.3:
                self._sparse(file)
            for _ in range(draw.choice((1, 1, 2, 3, 5))):
                place = draw.choice(_PLACES)
                try:
                    if place in file:
                        del file[place]
                except (KeyError, OSError, RuntimeError):
                    continue
                try:
                    _lead(file, place, draw)
                except (OSError, ValueError, RuntimeError, TypeError, KeyError, IndexError):
                    continue
            for name in ("x", "y"):
                if name not in file and file.get(name, getlink=True) is None and draw.random() < 0.8:
                    file[name] = file["own/a" if name == "x" else "own/b"]
        data = memory.getvalue()
        if draw.random() < 0.15:
            data = mutate(data, draw)
        command = (("data", *draw.choice(COMMANDS)),)
        return Case({"x.h5": data, **_OWN}, command, {}, "", {"twice": False})

    def _sparse(self, file: h5py.File) -> None:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", np.array([20, 4])
        group["data"], group["indices"] = np.arange(40, dtype="u1"), (np.arange(40) % 4).astype("u1")
        group["indptr"] = np.arange(0, 42, 2).astype("u1")


def _lead(file: h5py.File, place: str, draw: random.Random) -> None:
    """Make one name lead to another file."""
    other, target, kind = draw.choice(_FILES), draw.choice(_TARGETS), draw.choice(_KINDS)
    rows = draw.choice((4, 20, 20, 21, 40))
    way = draw.randrange(6)
    if way == 0:
        file[place] = h5py.ExternalLink(other or ".", target)
    elif way == 1:
        file[place] = h5py.SoftLink(draw.choice((target, "/linked", "linked/secret", "/own/../x", place, "/y")))
        if "linked" not in file:
            file["linked"] = h5py.ExternalLink(other or ".", draw.choice(("/", "/group")))
    elif way in (2, 3):
        size = rows * np.dtype(kind).itemsize
        parts = draw.choice((1, 1, 2))
        external = [(draw.choice(_FILES) or "raw.bin", draw.choice((0, 1, 8)), -(-size // parts)) for _ in range(parts)]
        if draw.random() < 0.2:
            external[-1] = (*external[-1][:2], h5py.h5f.UNLIMITED)
        file.create_dataset(place, (rows,), kind, external=external)
    else:
        growing = draw.random() < 0.3
        layout = h5py.VirtualLayout((rows,), kind, maxshape=(None,) if growing else None)
        for part in range(draw.choice((1, 1, 2))):
            source = h5py.VirtualSource(draw.choice((other, ".", draw.choice(_FILES))), target, (rows,),
                                        maxshape=(None,) if growing else None)  # fmt: skip
            if growing:
                layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
            elif part == 0:
                layout[:] = source
            else:
                layout[: rows // 2] = source[: rows // 2]
        file.create_virtual_dataset(place, layout, fillvalue=draw.choice((None, 0)))
