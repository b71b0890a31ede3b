"""`kerasmem.data.repack` keeps values and attributes in better chunks."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from converted import content, left_in, rows_of

from kerasmem import H5ChunkSequence
from kerasmem.data import repack
from kerasmem.datatools.reports import Conversion
from kerasmem.errors import DataError, UsageError

RNG = np.random.default_rng(0)
X, Y = RNG.random((900, 64)), np.repeat(np.arange(9), 100)


@pytest.fixture
def slow(tmp_path):
    with h5py.File(tmp_path / "slow.h5", "w") as file:
        x = file.create_dataset("deep/x", data=X, chunks=(900, 7), compression="gzip", shuffle=True)
        x.attrs["unit"], x.attrs["range"] = "mm", [0.0, 1.0]
        x.attrs["points to"] = file["deep"].ref
        file.create_dataset("deep/y", data=Y.astype(">i2"), chunks=(10,))
        file["notes"] = ["not for training"]
        file.attrs["title"] = "as measured"
    return tmp_path / "slow.h5"


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd:9"])
def test_values_types_and_attributes_stay(slow, tmp_path, compression):
    output = tmp_path / "out.h5"
    done = repack(slow, output, compression=compression)
    result = content(output)
    assert np.array_equal(result["deep/x"], X) and result["deep/x"].dtype == np.float64
    assert np.array_equal(result["deep/y"], Y) and result["deep/y"].dtype == np.int16
    with h5py.File(output) as file:
        attributes = dict(file["deep/x"].attrs)
        assert attributes["unit"] == "mm" and attributes["range"].tolist() == [0, 1] and "points to" not in attributes
        assert file.attrs["title"] == "as measured" and file["deep/x"].chunks[1:] == (64,)
    assert any("left out: 'notes' (holds text" in note for note in done.notes)
    assert left_in(tmp_path, slow, output) == [] and Conversion.from_dict(done.to_dict()) == done
    with H5ChunkSequence(output, "deep/x", "deep/y", batch_size=32) as sequence:
        assert sorted(y for _, batch in sequence for y in batch.tolist()) == Y.tolist()


def test_shuffled_and_as_float32(slow, tmp_path):
    repack(slow, tmp_path / "out.h5", shuffle=True, float32=True, columns={"x": "deep/x", "y": "deep/y"})
    result = content(tmp_path / "out.h5")
    assert rows_of(result, "x", "y") == rows_of({"x": X.astype("f4"), "y": Y}, "x", "y")
    assert not (np.diff(result["y"]) >= 0).all()


def test_refusals(slow, tmp_path):
    with pytest.raises(UsageError, match="must not be a source"):
        repack(slow, slow, force=True)
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(DataError, match="not an HDF5 file"):
        repack(tmp_path / "x.npy", tmp_path / "out.h5")
    with pytest.raises(DataError, match="the file does not exist"):
        repack(tmp_path / "none.h5", tmp_path / "out.h5")
    assert left_in(tmp_path, slow, "x.npy") == []
