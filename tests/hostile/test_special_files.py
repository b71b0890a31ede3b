"""Pipes, devices and sockets, in files or as paths, are never opened."""

from __future__ import annotations

import json
import os
import re
import socket

import h5py
import numpy as np
import pytest

import kerasmem
from kerasmem.errors import DataError

# Print the result of each command for dataset x of each file.
READ = """
import json, sys
import kerasmem
from kerasmem.errors import KerasmemError
from kerasmem.hdf5.rows.paths import Access
from kerasmem.models.document import read_document
from kerasmem.streaming.data_source import read_windows

def problem_of(path):
    found = {entry.name: entry.problem for entry in kerasmem.data.inspect(path).datasets}
    return found.get("x", "not listed")  # as what lies behind a link

WAYS = {
    "inspect": problem_of,
    "read": lambda path: list(read_windows([path], ["x"], access=Access())),
    "stats": lambda path: kerasmem.data.stats(path, ["x"]),
    "convert": lambda path: kerasmem.data.convert(path, "out.h5", columns={"x": "x"}),
    "repack": lambda path: kerasmem.data.repack(path, "out.h5", columns={"x": "x"}),
    "model": lambda path: read_document(path),
}
for path in sys.argv[1:]:
    for way, read in WAYS.items():
        try:
            said = str(read(path))
        except KerasmemError as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([path, way, said]), flush=True)
"""


def virtual(path, source, unlimited=False, pattern=False, kind="f4"):
    """A virtual dataset over x of the file `source`."""
    with h5py.File(path, "w", libver="latest") as file:
        file["y"] = np.arange(10)
        space = h5py.h5s.create_simple((10,), (h5py.h5s.UNLIMITED,) if unlimited or pattern else (10,))
        there = h5py.h5s.create_simple((10,), (h5py.h5s.UNLIMITED,) if unlimited else (10,))
        if unlimited:
            there.select_hyperslab((0,), (1,), (1,), (h5py.h5s.UNLIMITED,))
            space.select_hyperslab((0,), (1,), (1,), (h5py.h5s.UNLIMITED,))
        elif pattern:
            space.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (10,), (10,))
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_virtual(space, os.fsencode(source), b"x", there)
        h5py.h5d.create(file.id, b"x", h5py.h5t.py_create(np.dtype(kind)), space, creation)
    return path


def linked(path, target, soft=False):
    """An external link, or a soft one to a group behind one."""
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(10)
        file["group/deep" if soft else "x"] = h5py.ExternalLink(str(target), "/")
        if soft:
            file["x"] = h5py.SoftLink("/group/deep/x")
            file["sparse/indptr"] = h5py.ExternalLink(str(target), "/")
    return path


def stored(path, target, kind="f4"):
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(10)
        file.create_dataset("x", (10,), kind, external=[(str(target), 0, 10 * np.dtype(kind).itemsize)])
    return path


_REFUSED = re.compile("another file|other files|external link|by a pattern")


@pytest.fixture
def hostile_files(tmp_path, fifo):
    """Files whose dataset x refers to a pipe, device or socket."""
    link = tmp_path / "link-to-pipe"
    os.symlink(fifo, link)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    (tmp_path / "run0.h5").symlink_to(fifo)
    nested = virtual(tmp_path / "nested.h5", fifo, unlimited=True)
    return [
        virtual(tmp_path / "virtual.h5", fifo),
        virtual(tmp_path / "unlimited.h5", fifo, unlimited=True),
        virtual(tmp_path / "by-symlink.h5", link, unlimited=True),
        virtual(tmp_path / "device.h5", "/dev/zero", unlimited=True),
        virtual(tmp_path / "socket.h5", "socket", unlimited=True),
        virtual(tmp_path / "pattern.h5", "run%b.h5", pattern=True),
        virtual(tmp_path / "of-virtual.h5", "nested.h5", unlimited=True),
        virtual(tmp_path / "moved.h5", f"/elsewhere/{fifo.name}", unlimited=True),  # HDF5 looks beside the file too
        virtual(tmp_path / "of-external.h5", stored(tmp_path / "of.h5", fifo).name),
        linked(tmp_path / "link.h5", fifo),
        linked(tmp_path / "link-of-link.h5", linked(tmp_path / "first.h5", fifo), soft=True),
        linked(tmp_path / "link-to-virtual.h5", nested, soft=True),
        stored(tmp_path / "stored.h5", fifo),
        stored(tmp_path / "stored-device.h5", "/dev/zero"),
        nested,
    ]


def test_links_to_pipes_and_devices_are_never_opened(attack, tmp_path, hostile_files):
    done = attack(*(path.name for path in hostile_files), script=READ, seconds=60)
    assert done.code == 0, done.err[-2000:]
    found = [json.loads(line) for line in done.out.splitlines()]
    assert len(found) == 6 * len(hostile_files)
    for path, way, said in found:
        where = f"{path} {way}: {said}"
        if way == "model":
            assert "without an architecture" in said, where
        elif path.startswith("link") and way != "read":
            assert "not listed" in said or "no dataset 'x'" in said or "no column" in said, where
        else:
            assert _REFUSED.search(said), where
    assert not (tmp_path / "out.h5").exists()


def test_pipes_and_devices_are_refused(attack, hostile_files):
    paths = ["pipe", "link-to-pipe", "/dev/zero", "socket"]
    done = attack(*paths, script=READ, seconds=20)
    assert done.code == 0, done.err[-2000:]
    found = [json.loads(line) for line in done.out.splitlines()]
    assert len(found) == 6 * len(paths)
    assert all("not a file" in said or "no regular file" in said or "not a regular file" in said for *_, said in found)


def test_a_model_with_weights_in_a_pipe(attack, tmp_path, fifo):
    """HDF5 would read the shape of a virtual weight from the pipe."""
    virtual(tmp_path / "model.h5", fifo, unlimited=True)
    with h5py.File(tmp_path / "model.h5", "a") as file:
        file.move("x", "model_weights/x")
        file.attrs["model_config"] = "{}"
    script = "import sys; from kerasmem.models.document import read_document; print(read_document(sys.argv[1]).config)"
    done = attack(tmp_path / "model.h5", script=script, seconds=20)
    assert (done.code, done.out) == (0, "{}\n"), done.text


def test_class_names_are_not_read_from_other_files(tmp_path, secret):
    with h5py.File(tmp_path / "private" / "other.h5", "w") as file:
        file["x"] = np.array([b"TOP-SECRET-"] * 4)
    virtual(tmp_path / "virtual.h5", tmp_path / "private" / "other.h5", kind="S64")
    stored(tmp_path / "stored.h5", secret, kind="S64")
    for path in (tmp_path / "virtual.h5", tmp_path / "stored.h5"):
        with h5py.File(path, "a") as file:
            file.move("x", "y_class_names")
            file["x"] = np.zeros((10, 3), "f4")
        out = tmp_path / f"{path.stem}-out.h5"
        assert "TOP-SECRET" not in f"{kerasmem.data.inspect(path)} {kerasmem.data.convert(path, out)}"
        assert b"TOP-SECRET" not in out.read_bytes()


@pytest.mark.parametrize("part", ["data", "indices", "indptr"])
def test_sparse_matrix_in_another_file_is_refused(tmp_path, secret, part):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", [4, 8]
        for name, values in {"data": np.ones(8, "u1"), "indices": np.arange(8, dtype="u1"),
                             "indptr": np.array([0, 2, 4, 6, 8], "u1")}.items():  # fmt: skip
            if name == part:
                group.create_dataset(name, values.shape, "u1", external=[(str(secret), 0, len(values))])
            else:
                group[name] = values
    with pytest.raises(DataError, match="another file"):
        kerasmem.data.convert(tmp_path / "data.h5", tmp_path / "out.h5")
