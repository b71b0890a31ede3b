"""Small sound HDF5 files with different structures."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

Fill = Callable[[h5py.File], None]


def hdf5_bytes(fill: Fill, **options: Any) -> bytes:
    """Return the bytes of a file that a function fills."""
    memory = io.BytesIO()
    with h5py.File(memory, "w", **options) as file:
        fill(file)
    return memory.getvalue()


def low_level(
    file: h5py.File, name: str, values: np.ndarray, *, chunk: tuple[int, ...] | None = None, early: bool = False,
    compact: bool = False, maximum: tuple[int, ...] | None = None, filters: Callable[[Any], None] | None = None,
    kind: Any = None,
) -> h5py.Dataset:  # fmt: skip
    """Write a dataset with properties that `create_dataset` cannot set."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunk:
        creation.set_chunk(chunk)
    if early:
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if compact:
        creation.set_layout(h5py.h5d.COMPACT)
    if filters:
        filters(creation)
    space = h5py.h5s.create_simple(values.shape, maximum)
    kind = h5py.h5t.py_create(values.dtype, logical=True) if kind is None else kind
    dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, creation))
    dataset[...] = values
    return dataset


def floats(*shape: int) -> np.ndarray:
    """Return numbers that compress."""
    return (np.arange(np.prod(shape)) % 37).astype("f4").reshape(shape)


def _plain(file: h5py.File) -> None:
    file["x"], file["y"] = floats(40, 6), np.arange(40) % 4
    file["y"].attrs["class_names"] = ["cat", "dog", "eel", "fox"]
    file["y_class_names"] = np.array([b"cat", b"dog", b"eel", b"fox"])
    file.attrs["note"] = "a file"


def _types(file: h5py.File) -> None:
    for kind in (">i2", "<f2", ">f8", "u1", "?", "<i8"):
        file[f"t{kind[1:]}"] = floats(12, 3).astype(kind)
    file["enum"] = np.arange(12, dtype="i1") % 3
    file.create_dataset("named", data=np.arange(12) % 2, dtype=h5py.enum_dtype({"NO": 0, "YES": 1}, basetype="i1"))
    file.create_dataset("array", (12,), np.dtype(("f4", (2, 3))))
    file["text"] = ["a"] * 12
    file["table"] = np.zeros(12, [("a", "i4"), ("b", "f8", (2,)), ("c", "S4")])
    file["complex"] = np.zeros(12, "c8")
    file["reference"] = np.array([file["enum"].ref] * 12, dtype=h5py.ref_dtype)


def _filters(file: h5py.File) -> None:
    x = floats(40, 6)
    file.create_dataset("gzip", data=x, chunks=(10, 6), compression="gzip", shuffle=True, fletcher32=True)
    file.create_dataset("lzf", data=x, chunks=(10, 3), compression="lzf")
    file.create_dataset("offset", data=x.astype("i4"), chunks=(10, 6), scaleoffset=3)
    low_level(file, "nbit", x.astype("i4"), chunk=(10, 6), filters=lambda plist: plist.set_filter(h5py.h5z.FILTER_NBIT))


def _groups(file: h5py.File) -> None:
    for name in ("train", "test/deep/deeper"):
        file[f"{name}/x"], file[f"{name}/y"] = floats(8, 2), np.arange(8) % 2
    file["soft"], file["hard"] = h5py.SoftLink("/train/x"), file["train/y"]
    for number in range(12):
        file["train"].attrs[f"a{number}"] = "text" * number
    file["names"] = np.array(["alpha", "beta", "gamma", "delta", "e", "f", "g", "h"], dtype=h5py.string_dtype())


def _many(file: h5py.File) -> None:
    for number in range(12):
        file[f"g/d{number:03}"] = np.arange(4) + number
        file["g"].attrs[f"attribute {number}"] = np.arange(8)


def _sparse(file: h5py.File) -> None:
    group = file.create_group("X")
    group.attrs["encoding-type"], group.attrs["encoding-version"] = "csr_matrix", "0.1.0"
    group.attrs["shape"] = np.array([10, 7])
    group["data"], group["indices"] = np.arange(1, 21, dtype="f4"), (np.arange(20) * 3 % 7).astype("i4")
    group["indptr"] = np.arange(0, 22, 2).astype("i4")
    file["obs/kind/codes"], file["obs/kind/categories"] = (np.arange(10) % 2).astype("i1"), [b"a", b"b"]
    file.attrs["encoding-type"] = "anndata"


def _virtual(file: h5py.File) -> None:
    file["a"], file["b"] = floats(10, 4), floats(10, 4)[::-1].copy()
    layout = h5py.VirtualLayout((20, 4), "f4")
    layout[:10], layout[10:] = h5py.VirtualSource(".", "a", (10, 4)), h5py.VirtualSource(".", "b", (10, 4))
    file.create_virtual_dataset("x", layout, fillvalue=3)
    file["y"] = np.arange(20) % 2


def _compact(file: h5py.File) -> None:
    low_level(file, "x", floats(10, 4), compact=True)
    low_level(file, "y", np.arange(10, dtype="i4"), early=True)


def _empty(file: h5py.File) -> None:
    file.create_dataset("x", (100, 4), "f4", chunks=(10, 4), fillvalue=7)
    file["x"][:50] = floats(50, 4)
    file.create_dataset("never", (100, 4), "f4")
    file.create_dataset("none", data=h5py.Empty("f4"))
    file["scalar"] = 3.5


def _of(kind: str, *, gzip: bool = False, size: int = 40) -> Fill:
    """Return a function that writes datasets with one kind of chunk index."""
    filters = {"compression": "gzip", "shuffle": True} if gzip else {}

    def fill(file: h5py.File) -> None:
        shape, chunk = (size, 6), (2, 6)
        maximum = {"fixed": None, "extensible": (None, 6), "tree": (None, None), "single": None, "implicit": None}[kind]
        if kind == "single":
            chunk = shape
        if kind == "implicit":
            low_level(file, "x", floats(*shape), chunk=(2, 3), early=True)
            low_level(file, "odd", floats(7, 5), chunk=(4, 4), early=True)
        else:
            file.create_dataset("x", data=floats(*shape), chunks=chunk, maxshape=maximum, **filters)
            file.create_dataset("odd", data=floats(7, 5), chunks=(4, 4) if kind != "single" else (7, 5),
                                maxshape=maximum and tuple(None if size is None else 5 for size in maximum),
                                **filters)  # fmt: skip
        file["y"] = np.arange(size) % 3

    return fill


def whole_files() -> dict[str, bytes]:
    """Return sound files of all structures, by name."""
    fills = {"plain": _plain, "types": _types, "filters": _filters, "groups": _groups, "many": _many,
             "sparse": _sparse, "virtual": _virtual, "compact": _compact, "empty": _empty}  # fmt: skip
    files = {f"{name} old": hdf5_bytes(fill) for name, fill in fills.items()}
    files |= {f"{name} new": hdf5_bytes(fill, libver="latest") for name, fill in fills.items()}
    files["user block"] = hdf5_bytes(_plain, userblock_size=512)
    paged = {"fs_strategy": "page", "fs_page_size": 512, "libver": "latest"}
    files["pages"] = hdf5_bytes(_plain, **paged)
    files["tracked"] = hdf5_bytes(_groups, track_order=True, libver="latest")
    return files


def index_files() -> dict[str, bytes]:
    """Return sound files with each kind of chunk index. Large ones have several levels or pages."""
    files = {}
    for kind, large in (("fixed", 2200), ("extensible", 600), ("tree", 700), ("single", 0), ("implicit", 0)):
        for gzip in (False, True)[: 1 if kind == "implicit" else 2]:
            sizes = {"": 40, " large": large}
            for text, size in sizes.items():
                if size:
                    name = f"{kind}{' gzip' if gzip else ''}{text}"
                    files[name] = hdf5_bytes(_of(kind, gzip=gzip, size=size), libver="latest")
    for gzip in (False, True):
        for size in (40, 400):
            fill = _of("extensible", gzip=gzip, size=size)
            files[f"version 1 tree{' gzip' if gzip else ''} {size}"] = hdf5_bytes(fill)
    return files
