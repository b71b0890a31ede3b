"""`kerasmem.data.stats` agrees with NumPy and with Keras's adapt, and its lines of Python run."""

from __future__ import annotations

import h5py
import keras
import numpy as np
import pytest

import kerasmem
from kerasmem import H5ChunkSequence
from kerasmem.datatools.reports import DataStats
from kerasmem.errors import DataError, UsageError

RNG = np.random.default_rng(0)


def write(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            rows = max(1, len(array) // 7)
            file.create_dataset(
                name, data=array, chunks=(rows, *array.shape[1:]), compression="gzip", compression_opts=1
            )
    return path


def run(code):
    names = {"keras": keras, "kerasmem": kerasmem}
    exec(code, names)
    return names


@pytest.mark.parametrize(("shape", "dtype"), [((5,), "f4"), ((40,), ">f8"), ((6, 7, 3), "u1"), ((), "u1"), ((), "f4")])
def test_it_agrees_with_keras(tmp_path, shape, dtype):
    x = (RNG.random((3000, *shape)) * 200).astype(dtype)
    y = RNG.choice(4, 3000, p=[0.7, 0.15, 0.1, 0.05])
    path = write(tmp_path / "d.h5", x=x, y=y)
    stats = kerasmem.data.stats(path)
    axis = -1 if shape else None
    layer = keras.layers.Normalization(axis=axis)
    layer.adapt(x.astype("f4"))
    if not shape and dtype == "u1":
        assert stats["x"].class_counts is not None  # whole numbers, one a row: as likely labels
    else:
        ours = run(stats.code)["normalization"]
        batch = x[:64].astype("f4")
        assert np.allclose(ours(batch), layer(batch), rtol=1e-3, atol=2e-3)
    reduced = tuple(range(x.ndim - 1)) if shape else None
    exact = x.astype("f8")
    assert np.allclose(stats["x"].mean, exact.mean(axis=reduced), rtol=1e-12)
    assert np.allclose(stats["x"].variance, exact.var(axis=reduced), rtol=1e-10)
    assert (stats["x"].minimum, stats["x"].maximum) == (float(exact.min()), float(exact.max()))
    counts = np.bincount(y)
    weights = {k: 3000 / (4 * int(n)) for k, n in enumerate(counts)}
    assert stats["y"].class_counts == dict(enumerate(counts.tolist())) and stats["y"].class_weight == pytest.approx(
        weights
    )
    assert run(stats.code)["class_weight"] == pytest.approx(weights, rel=1e-5)
    assert DataStats.from_dict(stats.to_dict()) == stats


def test_far_from_zero_and_many_pieces(tmp_path):
    """Deviations are a millionth of the mean, where the textbook formula fails."""
    x = 1e8 + RNG.random((200_000, 3)) * 100
    stats = kerasmem.data.stats(write(tmp_path / "d.h5", x=x))
    assert np.allclose(stats["x"].variance, x.var(axis=0), rtol=1e-9)
    naive = np.square(x).mean(axis=0) - np.square(x.mean(axis=0))
    assert not np.allclose(naive, x.var(axis=0), rtol=1e-9)


def test_nan_and_infinity_are_left_out(tmp_path):
    x = RNG.random((5000, 4))
    x[RNG.random(x.shape) < 0.1] = np.nan
    x[17, 2], x[18, 3] = np.inf, -np.inf
    x[:, 0] = np.nan
    stats = kerasmem.data.stats(write(tmp_path / "d.h5", x=x))["x"]
    finite = np.where(np.isfinite(x), x, np.nan)
    assert stats.nan_count == int(np.isnan(x).sum()) and stats.infinite_count == 2
    assert np.allclose(stats.mean[1:], np.nanmean(finite[:, 1:], axis=0)) and stats.mean[0] == 0
    assert np.allclose(stats.variance[1:], np.nanvar(finite[:, 1:], axis=0))
    assert stats.maximum == np.nanmax(finite) and stats.minimum == np.nanmin(finite)


def test_names_and_refusals(tmp_path):
    x = RNG.integers(0, 256, (300, 5, 5, 3), "u1")
    path = write(tmp_path / "d.h5", x=x, y=np.arange(300), w=RNG.random(300), other=RNG.random((10, 2)))
    stats = kerasmem.data.stats(path)
    assert np.allclose(stats["x"].mean, x.mean(axis=(0, 1, 2))) and {c.name for c in stats.columns} == {"x", "y", "w"}
    with H5ChunkSequence(path, "x", "y", shuffle=False, batch_size=300) as sequence:
        normal = np.asarray(run(stats.code)["normalization"](sequence[0][0]))
    assert abs(normal.mean()) < 1e-3 and abs(normal.std() - 1) < 1e-2
    assert [column.name for column in kerasmem.data.stats(path, ["w"]).columns] == ["w"]
    with pytest.raises(DataError, match="differ in their number of rows"):
        kerasmem.data.stats(path, ["x", "other"])
    with pytest.raises(UsageError, match="there is no dataset 'nope'"):
        kerasmem.data.stats(path, ["nope"])
    with h5py.File(tmp_path / "text.h5", "w") as file:
        file["words"] = ["a"]
    with pytest.raises(DataError, match=r"no dataset that can be trained from.*holds text"):
        kerasmem.data.stats(tmp_path / "text.h5")
