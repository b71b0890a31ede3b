"""`kerasmem.data.convert` from HDF5 files of other programs."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from converted import content, left_in, streamed

from kerasmem.data import convert
from kerasmem.errors import DataError

RNG = np.random.default_rng(0)
X = RNG.random((300, 8))
Y = np.arange(300) % 5


def test_existing_files_follow_one_another(tmp_path):
    for number in range(3):
        part = slice(number * 100, number * 100 + 100)
        with h5py.File(tmp_path / f"run{number}.h5", "w") as file:
            file.create_dataset(
                "train/x", data=X[part].astype(">f8"), chunks=(7, 3), compression="gzip", fletcher32=True
            )
            file.create_dataset("train/y", data=Y[part], chunks=(33,)).attrs["class_names"] = list("abcde")
            file["words"], file["single"] = ["a", "b"], 4.0
    done = convert(str(tmp_path / "run*.h5"), tmp_path / "out.h5", compression="zstd", shuffle=False)
    x, y = streamed(tmp_path / "out.h5", "train/x", "train/y")
    assert np.array_equal(x, X.astype("f4")) and np.array_equal(y, Y)
    with h5py.File(tmp_path / "out.h5") as file:
        assert list(file["train/y"].attrs["class_names"]) == list("abcde")
    (note,) = (note for note in done.notes if "'words'" in note)
    assert "run0.h5' and 2 more files: left out: 'words' (holds text" in note
    assert done.datasets[0].source_dtype == "big-endian float64"
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["x"], file["once"] = X, [1.0]
    (note,) = convert(tmp_path / "one.h5", tmp_path / "out-one.h5").notes
    assert note == "left out: 'once' (it has 1 row, and the others have 300)"


@pytest.mark.optional
def test_anndata_sparse_and_dense(tmp_path):
    anndata = pytest.importorskip("anndata")
    pandas = pytest.importorskip("pandas")
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.random(300, 40, 0.1, "csr", random_state=0, dtype="f4")
    kinds = np.array(["t", "b", "nk"])[np.arange(300) % 3]
    obs = pandas.DataFrame(
        {"n": np.arange(300), "kind": pandas.Categorical(kinds)}, index=[f"c{k}" for k in range(300)]
    )
    data = anndata.AnnData(matrix, obs=obs)
    data.obsm["pca"] = X[:, :2]
    data.layers["columns"] = matrix.tocsc()
    data.write_h5ad(tmp_path / "cells.h5ad")
    done = convert(
        tmp_path / "cells.h5ad", tmp_path / "out.h5", columns={"x": "X", "y": "obs/kind/codes"}, memory_budget="1MiB"
    )
    x, y = streamed(tmp_path / "out.h5")
    assert np.array_equal(x, matrix.toarray()) and np.array_equal(np.array(["b", "nk", "t"])[y], kinds)
    assert next(d for d in done.datasets if d.name == "y").class_names == ("b", "nk", "t")
    done = convert(tmp_path / "cells.h5ad", tmp_path / "all.h5")
    result = content(tmp_path / "all.h5")
    assert np.array_equal(result["obsm/pca"], X[:, :2].astype("f4")) and np.array_equal(result["obs/n"], np.arange(300))
    assert any("'layers/columns' (a sparse matrix" in note and "stored by columns" in note for note in done.notes)


def test_damaged_and_hostile_files(tmp_path):
    path = tmp_path / "d.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(50, 8), fletcher32=True)
        file["y"] = Y
        chunk = file["x"].id.get_chunk_info(4)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + 20] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"rows 200 to 250 of dataset 'x' cannot be read: its checksum"):
        convert(path, tmp_path / "out.h5", shuffle=True)
    assert left_in(tmp_path, path) == []
    raw = tmp_path / "secret"
    raw.write_bytes(X.tobytes())
    with h5py.File(path, "w") as file:
        file.create_dataset("x", X.shape, "f8", external=[(str(raw), 0, X.nbytes)])
    with pytest.raises(DataError, match="keeps its data in another file"):
        convert(path, tmp_path / "out.h5")
    convert(path, tmp_path / "out.h5", trust_file=True)
    assert np.array_equal(content(tmp_path / "out.h5")["x"], X.astype("f4"))
    with h5py.File(path, "w") as file:
        file["x"], file["loop"] = X, h5py.SoftLink("/loop")
        file["elsewhere"] = h5py.ExternalLink("secret", "x")
    convert(path, tmp_path / "out.h5", force=True)
    assert set(content(tmp_path / "out.h5")) == {"x"}
