"""Texts in data files: thousands of references to one text, and texts in hostile chunks."""

from __future__ import annotations

import json
import zlib

import h5py
import numpy as np
import pytest

import kerasmem
from kerasmem.datatools import listing
from kerasmem.hdf5.format.filters import DecodeError
from kerasmem.hdf5.rows.paths import Access
from kerasmem.hdf5.rows.safe_reading import read_attribute, read_names

LARGE, TIMES = 4 << 20, 3900
READ = """
import json, sys

import kerasmem

for path in sys.argv[1:]:
    found = kerasmem.data.inspect(path)
    names = {each.name: each.class_names and len(each.class_names) for each in found.datasets}
    kerasmem.data.stats(path)
    kerasmem.data.convert(path, path + "-converted.h5", columns={"x": "x", "y": "y"})
    kerasmem.data.repack(path, path + "-repacked.h5", columns={"x": "x", "y": "y"})
    print(json.dumps([path, names]))
"""


def place_of(data, length, following):
    """Return the offset of the reference to a text of `length` bytes, followed by one of `following` bytes."""
    at = data.index(length.to_bytes(4, "little"))
    while int.from_bytes(data[at + 16 : at + 20], "little") != following:
        at = data.index(length.to_bytes(4, "little"), at + 1)
    return at


def repeat_first(path, count):
    """Let the first `count` elements of a dataset of texts refer to the first, large text."""
    data = bytearray(path.read_bytes())
    at = place_of(data, LARGE, 1)
    data[at : at + 16 * count] = data[at : at + 16] * count
    path.write_bytes(data)


def write(path, where, texts, libver="earliest", **options):
    with h5py.File(path, "w", libver=libver, **options) as file:
        file["x"], file["y"] = np.zeros((8, 3), "f4"), np.arange(8) % 4
        text = h5py.string_dtype()
        if where == "dataset":
            file.create_dataset("y_class_names", data=texts, dtype=text)
        elif where == "categories":
            file.move("y", "obs/codes")
            file.create_dataset("obs/categories", data=texts, dtype=text)
            file["y"] = np.arange(8) % 4
        else:
            item, name = where
            file[item].attrs.create(name, texts, dtype=text)
    return path


PLACES = [("y", "class_names"), ("/", "encoding-type"), ("x", "note"), "dataset", "categories"]


def test_repeated_references_to_one_text_are_not_expanded(attack, tmp_path):
    paths = []
    for number, where in enumerate(PLACES):
        paths.append(write(tmp_path / f"bomb{number}.h5", where, ["x" * LARGE] + ["y"] * (TIMES - 1)))
        repeat_first(paths[-1], TIMES)
        assert paths[-1].stat().st_size < 5 << 20
    done = attack(*paths, script=READ, seconds=60, memory=1 << 29)
    assert done.code == 0, done.text
    found = [json.loads(line) for line in done.out.splitlines()]
    assert len(found) == len(PLACES)
    assert not any(any(names.values()) for _, names in found)


def test_class_names_of_all_datasets_share_one_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "MOST_TEXT", 100)
    with h5py.File(tmp_path / "many.h5", "w") as file:
        for name in "abc":
            file[name] = np.zeros(8)
            file[name].attrs["class_names"] = ["x" * 20, "y" * 20]
    listed = listing.list_contents(str(tmp_path / "many.h5")).entries
    assert [entry.class_names is not None for entry in listed] == [True, True, False]


def test_many_texts_in_an_attribute_need_trust(tmp_path):
    path = write(tmp_path / "names.h5", ("y", "class_names"), [f"class {number}" for number in range(33)])
    (untrusted,) = (entry for entry in listing.list_contents(str(path)).entries if entry.name == "y")
    (trusted,) = (entry for entry in listing.list_contents(str(path), Access(True)).entries if entry.name == "y")
    assert untrusted.class_names is None and len(trusted.class_names) == 33
    done = kerasmem.data.repack(path, tmp_path / "out.h5")
    assert any("'class_names' of 'y'" in note for note in done.notes)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("options", [{}, {"userblock_size": 512}])
def test_texts_equal_those_of_hdf5(tmp_path, libver, options):
    texts = ["", "a", "größe", "tail" * 3000, "a"]
    path = tmp_path / "sound.h5"
    with h5py.File(path, "w", libver=libver, **options) as file:
        kinds = {"variable": h5py.string_dtype(), "fixed": h5py.string_dtype(length=12_000), "numbers": np.int16}
        stored = {
            "contiguous": {}, "chunked": {"chunks": (2,)}, "packed": {"chunks": (2,), "compression": "gzip"},
            "checked": {"chunks": (3,), "shuffle": True, "fletcher32": True},
        }  # fmt: skip
        for kind, dtype in kinds.items():
            values = range(5) if kind == "numbers" else [text.encode() for text in texts]
            for how, settings in stored.items():
                if kind == "variable" and how == "checked":
                    continue  # HDF5 takes none
                file.create_dataset(f"{kind} {how}", data=values, dtype=dtype, **settings)
        item = file["variable packed"]
        item.attrs["many"], item.attrs["one"], item.attrs["number"] = texts, "größe", 7
        for number in range(5):
            item.attrs[f"more {number}"] = "x" * 9000  # the header goes on elsewhere
    with h5py.File(path) as file:
        for name, dataset in file.items():
            wanted = [str(value) for value in dataset] if "numbers" in name else list(dataset.asstr())
            assert read_names(dataset, 100) == wanted, name
            assert read_names(dataset, 4) is None
        item = file["variable packed"]
        assert read_attribute(item, "many").tolist() == texts
        assert [read_attribute(item, name) for name in ("one", "number", "absent")] == ["größe", 7, None]
        assert read_attribute(item, "more 4") == "x" * 9000
        assert read_attribute(item, "many", most=79) is None


def test_texts_in_a_short_chunk_are_refused(tmp_path):
    path = tmp_path / "short.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (1000,), h5py.string_dtype(), chunks=(1000,), compression="gzip")
        dataset.id.write_direct_chunk((0,), zlib.compress(b"\1" * 40), 0)
    with h5py.File(path) as file, pytest.raises(DecodeError, match="decompresses to 40 bytes"):
        read_names(file["x"], 1000)
