"""Hostile checkpoints: oversized or deeply nested content is refused before it takes memory."""

from __future__ import annotations

import errno
import io
import json
import tracemalloc
import zipfile

import numpy as np
import pytest

from kerasmem.errors import DataError
from kerasmem.training import checkpoint as module
from kerasmem.training.checkpoint import Checkpoint
from kerasmem.training.indexed_sources import BatchSource
from kerasmem.training.run_state import RunState

MIB = 2**20


class Data:
    """The least that a checkpoint asks of a source."""

    kind, reads_skipped = "stub", False

    def describe(self):
        return {}

    def position(self, run):
        return {}


@pytest.fixture
def checkpoint(tmp_path):
    made = Checkpoint(str(tmp_path / "run.resume"), Data(), keeps_before=True)
    made.write(RunState(epoch=1), {"model": [np.arange(12, dtype="f4").reshape(3, 4)]})
    return made


def entries(checkpoint):
    with zipfile.ZipFile(checkpoint.path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def replace(checkpoint, compression=zipfile.ZIP_STORED, **arrays):
    content = entries(checkpoint) | {f"{name}.npy": data for name, data in arrays.items()}
    with zipfile.ZipFile(checkpoint.path, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def change_metadata(checkpoint, change):
    """Change the metadata of the archive."""
    found = json.loads(np.load(io.BytesIO(entries(checkpoint)["saved.npy"])).tobytes())
    change(found)
    replace(checkpoint, saved=npy(np.frombuffer(json.dumps(found).encode(), np.uint8)))


def deep(checkpoint):
    replace(checkpoint, saved=npy(np.frombuffer(b"[" * 200_000, np.uint8)))


def compressed(checkpoint):
    replace(checkpoint, zipfile.ZIP_DEFLATED, model0=npy(np.zeros(64 * MIB, "u1")))


def overlapping(checkpoint):
    """Many names for the same bytes."""
    replace(checkpoint, model0=npy(np.zeros(MIB, "u1")))
    with zipfile.ZipFile(checkpoint.path, "a") as archive:
        for number in range(1, 2000):
            again = zipfile.ZipInfo(f"model{number}.npy")
            first = archive.getinfo("model0.npy")
            for name in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(again, name, getattr(first, name))
            archive.filelist.append(again)
        archive._didModify = True


def endless_shape(checkpoint):
    huge = npy(np.zeros(4, "u1")).replace(b"(4,), }" + b" " * 12, b"(400000000000,), }  ")
    assert b"400000000000" in huge
    replace(checkpoint, model0=huge)


def variable_is(place, value):
    """Have the archive say another type (0) or shape (1) of its variable."""

    def change(found):
        found["variables"]["model"][0][place] = value

    return lambda checkpoint: change_metadata(checkpoint, change)


def no_header(checkpoint):
    text = b"{'descr': '<f4', (".ljust(117) + b"\n"
    replace(checkpoint, saved=b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


def a_pickle(checkpoint):
    replace(checkpoint, model0=npy(np.array([{}], object)))


def a_plain_array(checkpoint):
    with open(checkpoint.path, "wb") as file:
        np.save(file, np.zeros(4))


def an_array_that_ends_as_an_archive(checkpoint):
    with open(checkpoint.path, "rb") as file:
        archive = file.read()
    with open(checkpoint.path, "wb") as file:
        file.write(npy(np.zeros(4)) + archive)


def cut(checkpoint):
    with open(checkpoint.path, "r+b") as file:
        file.truncate(300)


BOMBS = {
    "deep": deep, "compressed": compressed, "overlapping": overlapping, "endless shape": endless_shape,
    "other shape": variable_is(1, [2**40, 2**40]), "no shape": variable_is(1, 1), "objects": variable_is(0, "variant"),
    "no header": no_header, "a pickle": a_pickle, "a plain array": a_plain_array,
    "an array that ends as an archive": an_array_that_ends_as_an_archive, "cut": cut,
}  # fmt: skip


@pytest.mark.parametrize("make", BOMBS.values(), ids=BOMBS)
def test_hostile_checkpoint_takes_little_memory(checkpoint, make):
    make(checkpoint)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"run\.resume': not a checkpoint of kerasmem.*delete it to start over"):
            Checkpoint(checkpoint.path, Data()).read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * MIB


@pytest.mark.parametrize(
    "counts",
    [{"epoch": 10**18}, {"batch": 10**18}, {"epoch": -1}, {"steps": -4}, {"micro_batch_rows": -1}, {"epochs": [5]},
     {"epochs": [0, 0]}],
    ids=str,
)  # fmt: skip
def test_impossible_counts(checkpoint, counts):
    change_metadata(checkpoint, lambda found: found["run"].update(counts))
    with pytest.raises(DataError, match=rf"run\.resume': not a checkpoint of kerasmem.*{next(iter(counts))}"):
        Checkpoint(checkpoint.path, Data()).read()


def test_batch_beyond_the_epoch(checkpoint):
    checkpoint.write(RunState(batch=9, steps=4), {"model": []})
    read = Checkpoint(checkpoint.path, Data())
    read.read()
    with pytest.raises(DataError, match=r"run\.resume': batch 9 of an epoch of 4"):
        read.check(steps=4, at_once=1)


PLACES = [{}, {"seed": -1}, {"seed": 10**30}, {"seed": "1"}]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_invalid_position_in_the_data(checkpoint, place):
    checkpoint.source = BatchSource(None, 4, shuffle=True, steps=None)
    checkpoint.write(RunState(), {"model": []})
    saved = checkpoint.read()
    object.__setattr__(saved, "position", place)
    with pytest.raises(DataError, match=r"run\.resume': the position in the data is not valid"):
        checkpoint.go_to(saved.run, 0)


def test_links_are_not_followed(checkpoint, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"the only copy")
    (tmp_path / "run.resume.before").symlink_to(victim)
    with pytest.raises(DataError, match="is a link, which is not followed"):
        checkpoint.points()
    checkpoint.write(RunState(), {"model": []})
    assert victim.read_bytes() == b"the only copy"


def test_a_checkpoint_that_cannot_be_accessed_is_not_called_damaged(checkpoint, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(DataError, match=r"run\.resume/x' cannot be written: .*; free space, or choose another path"):
        Checkpoint(str(tmp_path / "run.resume" / "x"), Data()).write(RunState(), {"model": []})
    monkeypatch.setattr(module, "open_plain", refuse)
    with pytest.raises(DataError, match=r"run\.resume' cannot be read: Permission denied; make it readable$"):
        checkpoint.read()


def test_path_may_be_a_link_of_the_user(checkpoint, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "named").symlink_to("scratch/run.resume")
    linked = Checkpoint(str(tmp_path / "named"), Data())
    assert linked.read() is None
    linked.write(RunState(epoch=5), {"model": []})
    assert (tmp_path / "named").is_symlink() and (tmp_path / "scratch" / "run.resume").is_file()
    assert Checkpoint(str(tmp_path / "named"), Data()).read().run.epoch == 5
