"""`kerasmem.data.inspect` describes the stream of `H5ChunkSequence`, and its line of Python runs."""

from __future__ import annotations

import os
import zlib

import h5py
import numpy as np
import pytest

import kerasmem
from kerasmem import H5ChunkSequence
from kerasmem.data import convert
from kerasmem.datatools.reports import Inspection
from kerasmem.errors import DataError, UsageError

RNG = np.random.default_rng(0)
ROWS = 600


def run(line):
    """Run the line. Return the sequence and its first batch."""
    sequence = eval(line, {"H5ChunkSequence": H5ChunkSequence})
    with sequence:
        batch = sequence[0]
    return sequence, batch


def report(result, name):
    return next(dataset for dataset in result.datasets if dataset.name == name)


LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": (50, 20)},
    "gzip": {"chunks": (64, 20), "compression": "gzip", "shuffle": True},
    "columns": {"chunks": (600, 1), "compression": "gzip"},
    "large": {"chunks": (599, 20), "compression": "lzf"},
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("batch_size", [10, 200])
def test_the_report_matches_the_sequence(tmp_path, layout, batch_size):
    path = tmp_path / "d.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=RNG.random((ROWS, 20)), **LAYOUTS[layout])
        file["y"] = np.sort(RNG.integers(0, 6, ROWS))
    result = kerasmem.data.inspect(path, batch_size=batch_size)
    sequence, (x, y) = run(result.line)
    assert x.shape == (batch_size, 20) and y.shape == (batch_size,)
    assert result.stream == sequence.describe() and "advice" not in result.stream
    with sequence:
        assert sum(len(y) for _, y in sequence.next_epoch()) == ROWS
    x = report(result, "x")
    assert x.float32_bytes == ROWS * 80
    with h5py.File(path) as file:
        assert x.stored_bytes == file["x"].id.get_storage_size() and x.chunks == file["x"].chunks
    assert Inspection.from_dict(result.to_dict()) == result


def test_data_sorted_by_class_gets_advice(tmp_path):
    path = tmp_path / "d.h5"
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (4000, 40_000), "u1", chunks=(500, 40_000), compression="gzip", compression_opts=1)
        packed = zlib.compress(bytes(500 * 40_000), 1)
        for first in range(0, 4000, 500):
            x.id.write_direct_chunk((first, 0), packed)
        file["y"] = np.repeat(np.arange(8), 500)
    result = kerasmem.data.inspect(path)
    assert "mix a file sorted by class poorly: use a larger memory_budget" in result.stream


def test_names_are_guessed_or_passed(tmp_path):
    path = tmp_path / "d.h5"
    with h5py.File(path, "w") as file:
        file["train/images"] = RNG.integers(0, 256, (50, 9, 9), "u1")
        file["train/labels"] = np.arange(50) % 3
        file["test/images"] = RNG.integers(0, 256, (20, 9, 9), "u1")
        file["test/labels"] = np.arange(20) % 3
        file["aside"] = np.arange(50)
    result = kerasmem.data.inspect(path)
    assert (result.x, result.y) == ("train/images", "train/labels") and result.line.endswith("scale=1 / 255)")
    _, (x, _) = run(result.line)
    assert x.max() <= 1
    result = kerasmem.data.inspect(path, x="/test/images")
    assert (result.x, result.y) == ("test/images", "test/labels")
    for settings, message in (
        ({"x": "nope"}, "x: there is no dataset 'nope'; there are 'aside'"),
        ({"x": "train/images", "y": "test/labels"}, "y: 'test/labels' must have as many rows as 'train/images'"),
    ):
        with pytest.raises(UsageError, match=message):
            kerasmem.data.inspect(path, **settings)


# ---- what other programs leave


def test_files_without_usable_data(tmp_path):
    """Files without usable data, hostile names, thousands of objects, circular links, external data."""
    path = tmp_path / "d.h5"
    with h5py.File(path, "w") as file:
        file["words"] = ["a", "b"]
        file["single"] = 3.0
        file.create_dataset("never", (10, 3), "f4", chunks=(5, 3))
        file["loop"] = h5py.SoftLink("/loop")
        file["out"] = h5py.ExternalLink("/etc/passwd", "x")
    result = kerasmem.data.inspect(path)
    assert result.line == "" and result.x is None and {d.name for d in result.datasets} == {"words", "single", "never"}
    assert "holds text" in report(result, "words").problem and "never written" in report(result, "never").problem
    with h5py.File(path, "w") as file:
        file["x\x1b[31m\n"], file["y"] = np.zeros((9, 2)), np.arange(9)
        for number in range(5100):
            file.create_group(f"g{number}")
    result = kerasmem.data.inspect(path)
    assert any("only the first" in note for note in result.notes)


def test_a_listing_that_fails_leaves_nothing_open(tmp_path, monkeypatch):
    path = tmp_path / "d.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(9)

    def fail(*given):
        raise OSError("damaged")

    monkeypatch.setattr("kerasmem.datatools.listing.walk_objects", fail)
    with pytest.raises(DataError, match="damaged") as error:
        kerasmem.data.inspect(path)
    assert str(path) not in {os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")}, error


def test_the_line_of_a_conversion_runs(tmp_path):
    rng = np.random.default_rng(1)
    np.savez(
        tmp_path / "d.npz",
        images=rng.integers(0, 256, (40, 5, 5, 3), "u1"),
        label=np.arange(40) % 4,
        weight=rng.random(40),
    )
    done = convert(tmp_path / "d.npz", tmp_path / 'it\'s "here".h5')
    sequence, (x, y) = run(done.line)
    assert x.shape == (32, 5, 5, 3) and x.max() <= 1 and y.dtype == np.int64 and sequence.num_rows == 40
    assert kerasmem.data.inspect(tmp_path / 'it\'s "here".h5').line == done.line
