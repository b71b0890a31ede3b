"""Layouts of other programs: netCDF's packed values, a group per sample, MATLAB's axes, categories, tables."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from converted import content, write_netcdf

import kerasmem
from kerasmem import H5ChunkSequence
from kerasmem.data import convert, inspect, stats
from kerasmem.errors import DataError

RNG = np.random.default_rng(0)


def report(result, name):
    return next(dataset for dataset in result.datasets if dataset.name == name)


# ---- netCDF


@pytest.fixture
def packed(tmp_path):
    """Return 72 rows of int16 with a tenth of fill values, and the physical values with NaN."""
    stored = RNG.integers(0, 60, (72, 6)).astype("i2")
    stored[RNG.random(stored.shape) < 0.1] = -1
    path = write_netcdf(
        tmp_path / "f.nc",
        stored,
        ("x", "y"),
        scale_factor=0.05,
        add_offset=1.0,
        _FillValue=np.array([-1], "i2"),
        units="K",
    )
    return path, np.where(stored == -1, np.nan, stored * 0.05 + 1.0)


def test_dimension_scales_are_not_features_or_targets(packed, tmp_path):
    path, _ = packed
    with pytest.raises(DataError, match="'x' is a dimension scale"):
        H5ChunkSequence(path)
    result = inspect(path)
    assert (result.x, result.y) == ("t", None) and "dimension scale" in report(result, "x").problem
    assert list(content(convert(path, tmp_path / "out.h5").outputs[0])) == ["t"]
    with pytest.raises(kerasmem.errors.UsageError, match="'x' is a dimension scale"):
        stats(path, ["x"])


def test_inspect_proposes_the_scale_of_packed_values(packed):
    path, physical = packed
    result = inspect(path)
    assert "scale=(0.05, 1.0)" in result.line
    with eval(result.line, {"H5ChunkSequence": H5ChunkSequence}) as sequence:
        rows = np.concatenate([np.asarray(x) for (x,) in sequence])
    present = ~np.isnan(physical)
    assert np.allclose(rows[present], physical[present], atol=1e-6)
    assert any("-1 means a missing value" in note for note in result.notes)


def test_stats_unpack_and_leave_fill_values_out(packed):
    path, physical = packed
    result = stats(path)["t"]
    assert result.missing_count == np.isnan(physical).sum() > 0 and result.nan_count == 0
    assert np.allclose(result.mean, np.nanmean(physical, axis=0)) and np.allclose(
        result.variance, np.nanvar(physical, axis=0)
    )
    assert (result.minimum, result.maximum) == (np.nanmin(physical), np.nanmax(physical))


def test_convert_unpacks_to_nan_and_keeps_the_units(packed, tmp_path):
    path, physical = packed
    done = convert(path, tmp_path / "out.h5")
    assert np.allclose(content(tmp_path / "out.h5")["t"], physical, atol=1e-6, equal_nan=True)
    assert any(f"{np.isnan(physical).sum()} values of 't' are missing" in note for note in done.notes)
    assert done.datasets[0].source_dtype == "int16"
    with h5py.File(tmp_path / "out.h5") as file:
        assert set(file["t"].attrs) == {"units"}
    convert(path, tmp_path / "kept.h5", unpack=False)
    kerasmem.data.repack(path, tmp_path / "repacked.h5")
    for name in ("kept.h5", "repacked.h5"):
        assert content(tmp_path / name)["t"].dtype == "i2"
        assert stats(tmp_path / name)["t"] == stats(path)["t"]


@pytest.mark.parametrize(
    ("dtype", "attributes", "missing"),
    [
        ("f4", {"_FillValue": np.float32(1e20)}, lambda v: v == np.float32(1e20)),
        ("f4", {"missing_value": -9999.0}, lambda v: v == -9999),
        ("f8", {"missing_value": np.array([7.0, 8.0])}, lambda v: (v == 7) | (v == 8)),
        ("i2", {"valid_range": np.array([0, 40], "i2"), "scale_factor": 0.1}, lambda v: (v < 0) | (v > 40)),
        ("i2", {"valid_range": np.array([0.0, 4.0]), "scale_factor": 0.1}, lambda v: (v < 0) | (v > 40)),
        ("i2", {"valid_range": np.array([-4.0, 0.0]), "scale_factor": -0.1}, lambda v: (v < 0) | (v > 40)),
        ("f4", {"valid_min": 0.0, "valid_max": 50.0}, lambda v: (v < 0) | (v > 50)),
        ("i2", {"_FillValue": np.int16(-1), "_Unsigned": "true", "scale_factor": 2.0}, lambda v: v == -1),
    ],
)
def test_other_attributes_of_missing_values(tmp_path, dtype, attributes, missing):
    stored = RNG.integers(-3, 60, (50, 4)).astype(dtype)
    stored[3, 1] = attributes.get("_FillValue", stored[3, 1])
    stored[4, 2] = np.ravel(attributes.get("missing_value", stored[4, 2]))[0]
    path = write_netcdf(tmp_path / "f.nc", stored, ("time", "column"), **attributes)
    numbers = stored.view("u2") if "_Unsigned" in attributes else stored
    expected = np.where(missing(stored), np.nan, numbers * attributes.get("scale_factor", 1.0))
    convert(path, tmp_path / "out.h5")
    assert np.allclose(content(tmp_path / "out.h5")["t"], expected, equal_nan=True)
    result = stats(path)["t"]
    assert result.missing_count == np.isnan(expected).sum() > 0
    assert np.allclose(result.mean, np.nanmean(expected, axis=0))


def test_whole_numbers_without_a_scale_keep_their_fill_value(tmp_path):
    labels = np.array([0, 1, 2, 1, 0, -127] * 10, "i1")
    path = write_netcdf(tmp_path / "f.nc", labels, ("time",), _FillValue=np.int8(-127), units="1")
    done = convert(path, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert np.array_equal(file["t"], labels) and file["t"].attrs["_FillValue"] == -127
    assert any("10 values of 't' are missing and stay as stored" in note for note in done.notes)
    result = stats(path)["t"]
    assert result.class_counts == {0: 20, 1: 20, 2: 10} and result.missing_count == 10
    assert result.class_weight == pytest.approx({0: 50 / 60, 1: 50 / 60, 2: 50 / 30})


# ---- a group per sample


@pytest.mark.parametrize("parent", ["", "data/"])
def test_a_group_per_sample_is_stacked(tmp_path, parent):
    obs, action, reward = RNG.random((40, 12, 8)).astype("f4"), RNG.random((40, 12)).astype("f4"), np.arange(40)
    with h5py.File(tmp_path / "s.h5", "w") as file:
        for number in range(40):
            group = file.create_group(f"{parent}s{number}")
            group.create_dataset("obs", data=obs[number], chunks=(6, 8), compression="gzip")
            group["action"], group["reward"], group["name"] = action[number], reward[number], f"run {number}"
        file["mean"] = np.zeros(8)
    done = convert(tmp_path / "s.h5", tmp_path / "out.h5")
    written = content(tmp_path / "out.h5")
    assert np.array_equal(written[f"{parent}obs"], obs) and np.array_equal(written[f"{parent}action"], action)
    assert np.array_equal(written[f"{parent}reward"], reward) and len(done.notes) == 3
    assert f"40 groups, '{parent}s0' to '{parent}s39'" in done.notes[0]
    result = inspect(tmp_path / "s.h5")
    assert result.x is None or result.x == "mean"
    assert len(result.datasets) == 5 and "(40, 12, 8)" in result.notes[0] and "kerasmem data convert" in result.notes[0]
    convert(tmp_path / "s.h5", tmp_path / "parts.index", columns={"x": f"{parent}obs"}, part_size=10 * 12 * 8 * 4)
    with H5ChunkSequence(tmp_path / "parts.index", "x", None, shuffle=False, batch_size=40) as sequence:
        assert np.array_equal(sequence[0][0], obs)


def test_ragged_groups_are_refused_with_a_fix(tmp_path):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        for number in range(9):
            file[f"demo_{number}/obs"], file[f"demo_{number}/goal"] = np.zeros((5 + number, 3)), np.full(2, number)
    with pytest.raises(DataError, match=r"'obs' differs among 9 groups, a sample each: .*\(5, 3\), .*Pad them.*drop"):
        convert(tmp_path / "s.h5", tmp_path / "out.h5")
    convert(tmp_path / "s.h5", tmp_path / "out.h5", drop=["obs"])
    assert content(tmp_path / "out.h5")["goal"].tolist() == [[number] * 2 for number in range(9)]


def test_repeated_notes_are_one(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"] = np.zeros((50, 3))
        for number in range(30):
            file[f"word{number}"], file[f"short{number}"] = ["a"], np.zeros(7)
    notes = convert(tmp_path / "d.h5", tmp_path / "out.h5").notes
    assert len(notes) == 2 and all("and 27 more (" in note for note in notes)


# ---- MATLAB


def write_matlab(path, **arrays):
    """Write arrays as MATLAB 7.3 stores them: its first axis last."""
    with h5py.File(path, "w", userblock_size=512, libver="earliest") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array.T).attrs["MATLAB_class"] = np.bytes_("double")
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(116) + bytes(8) + b"\x00\x02IM")
    return path


def test_matlab_samples_on_its_first_axis(tmp_path):
    x, images, y = RNG.random((200, 5)), RNG.random((200, 7, 9)), np.arange(200.0)[:, None] % 4
    path = write_matlab(tmp_path / "m.mat", X=x, images=images, y=y, rate=np.ones((1, 1)))
    with pytest.raises(DataError, match="--rows-axis last"):
        convert(path, tmp_path / "out.h5")
    result = inspect(path)
    assert result.line == "" and any("--rows-axis last" in note for note in result.notes)
    with pytest.raises(DataError, match="--rows-axis last"):
        H5ChunkSequence(path, "X", "y")
    convert(path, tmp_path / "out.h5", rows_axis="last", memory_budget="1MiB")
    written = content(tmp_path / "out.h5")
    for name, values in {"X": x, "images": images, "y": y}.items():
        assert np.array_equal(written[name], values.astype("f4"))


@pytest.mark.parametrize("rows_axis", ["first", "last"])
def test_matlab_labels_are_rows_as_columns_and_as_rows(rows_axis, tmp_path):
    x, y = RNG.random((200, 7, 9, 1)), np.arange(200.0)[:, None] % 4
    stored = x if rows_axis == "last" else x.transpose(1, 2, 3, 0)  # samples on MATLAB's last axis: X(:, :, :, n)
    path = write_matlab(tmp_path / "m.mat", X=stored, column=y, row=y.T)
    convert(path, tmp_path / "out.h5", rows_axis=rows_axis)
    written = content(tmp_path / "out.h5")
    assert np.array_equal(written["column"], y) and np.array_equal(written["row"], y)
    assert np.array_equal(written["X"], (x if rows_axis == "last" else stored.T).astype("f4"))


def test_labels_that_matlab_stores_as_one_row_lead_to_convert(tmp_path):
    path = write_matlab(tmp_path / "m.mat", X=RNG.random((7, 9, 1, 200)), y=np.ones((200, 1)))
    with pytest.raises(DataError, match="kerasmem data convert"):
        H5ChunkSequence(path, "X", "y")
    assert any("'y' (1, 200)" in note and "data convert" in note for note in inspect(path).notes)


def test_rows_on_the_last_axis_of_other_files(tmp_path):
    images = RNG.random((7, 9, 50))
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(7, 9, 8), compression="gzip", shuffle=True)
        file["y"] = np.arange(50)
    convert(tmp_path / "d.h5", tmp_path / "out.h5", rows_axis="last")
    written = content(tmp_path / "out.h5")
    assert np.array_equal(written["images"], np.moveaxis(images, -1, 0).astype("f4")) and len(written["y"]) == 50


# ---- AnnData


def write_cells(path):
    """Write a sparse matrix and categories as AnnData does, a fifth of the rows without a category."""
    codes = (np.arange(50) % 5 - 1).astype("i1")
    with h5py.File(path, "w") as file:
        matrix = file.create_group("X")
        matrix.attrs["encoding-type"], matrix.attrs["shape"] = "csr_matrix", np.array([50, 30])
        matrix["data"], matrix["indices"], matrix["indptr"] = np.ones(50, "f4"), np.arange(50) % 30, np.arange(51)
        for name in ("cell_type", "batch"):
            column = file.create_group(f"obs/{name}")
            column.attrs["encoding-type"] = "categorical"
            column["codes"], column["categories"] = codes, [f"{name} {number}" for number in range(4)]
        file["obs/n_genes"] = np.arange(50)
    return path


def test_category_codes_are_not_features_and_minus_one_is_not_a_class(tmp_path):
    path = write_cells(tmp_path / "cells.h5ad")
    result = inspect(path)
    assert result.x == "obs/n_genes" and "codes'" not in result.line.partition("y=")[0]
    assert report(result, "obs/cell_type/codes").class_names == tuple(f"cell_type {number}" for number in range(4))
    sums = stats(path, ["obs/cell_type/codes"])["obs/cell_type/codes"]
    assert sums.class_weight == dict.fromkeys(range(4), 1.0) and sums.missing_count == 10
    done = convert(path, tmp_path / "out.h5", columns={"x": "X", "y": "obs/cell_type/codes"})
    assert any("10 values of 'obs/cell_type/codes' are missing" in note for note in done.notes)
    with h5py.File(path, "r+") as file:
        del file["obs/n_genes"]
    assert inspect(path).x is None


def test_the_refusal_of_a_sparse_matrix_names_convert(tmp_path):
    path = write_cells(tmp_path / "cells.h5ad")
    with pytest.raises(DataError, match="'X' is a sparse matrix; `kerasmem data convert` writes it dense"):
        H5ChunkSequence(path, "X", "obs/cell_type/codes")
    assert any("'X'" in note and "kerasmem data convert" in note for note in inspect(path).notes)


@pytest.mark.parametrize("options", [{}, {"chunks": (64,), "compression": "gzip"}])
def test_a_sparse_matrix_is_read_in_pieces_and_checked(tmp_path, options):
    dense = np.where(RNG.random((300, 40)) < 0.1, RNG.random((300, 40)), 0).astype("f4")
    dense[100:150] = 0
    rows, columns = np.nonzero(dense)
    parts = {"data": dense[rows, columns], "indices": columns, "indptr": np.searchsorted(rows, np.arange(301))}
    path = tmp_path / "cells.h5ad"
    with h5py.File(path, "w") as file:
        matrix = file.create_group("X")
        matrix.attrs["encoding-type"], matrix.attrs["shape"] = "csr_matrix", np.array(dense.shape)
        for name, values in parts.items():
            matrix.create_dataset(name, data=values, **options)
    convert(path, tmp_path / "out.h5", columns={"x": "X"}, memory_budget="64KiB")
    assert np.array_equal(content(tmp_path / "out.h5")["x"], dense)
    convert(path, tmp_path / "parts.index", columns={"x": "X"}, part_size=50 * 160)
    with H5ChunkSequence(tmp_path / "parts.index", "x", None, shuffle=False, batch_size=300) as sequence:
        assert np.array_equal(sequence[0][0], dense)
    for part, value, message in (("indices", 10_000, "outside its 40 columns"), ("indptr", 10**9, "is damaged")):
        with h5py.File(path, "r+") as file:
            file[f"X/{part}"][5] = value
        with pytest.raises(DataError, match=f"'X': .*{message}"):
            convert(path, tmp_path / "o3.h5", columns={"x": "X"})


# ---- tables


@pytest.mark.parametrize("options", [{}, {"chunks": (16,), "compression": "gzip"}])
def test_columns_of_a_table_are_read_in_pieces(tmp_path, options):
    table = np.zeros(300, [("image", "f4", (5, 4)), ("energy", ">f8"), ("kind", "u1"), ("name", "S8")])
    table["image"], table["energy"], table["kind"] = RNG.random((300, 5, 4)), RNG.random(300), np.arange(300) % 3
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file.create_dataset("events/LST", data=table, **options)
    columns = {"image": "events/LST/image", "y": "events/LST/kind"}
    convert(tmp_path / "t.h5", tmp_path / "out.h5", columns=columns, memory_budget="64KiB")
    written = content(tmp_path / "out.h5")
    assert np.array_equal(written["image"], table["image"]) and np.array_equal(written["y"], table["kind"])
    convert(tmp_path / "t.h5", tmp_path / "all.h5")
    assert np.array_equal(content(tmp_path / "all.h5")["events/LST/energy"], table["energy"].astype("f4"))
    with pytest.raises(DataError, match=r"a table with the columns 'image'.*kerasmem data convert --columns"):
        H5ChunkSequence(tmp_path / "t.h5", "events/LST", None, shuffle=False)
    result = inspect(tmp_path / "t.h5")
    assert report(result, "events/LST/image").shape == (300, 5, 4) and result.line == ""


@pytest.mark.parametrize("part", ["table", "X/data"])
def test_parts_that_were_never_written_are_refused(tmp_path, part):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        matrix = file.create_group("X")
        matrix.attrs["encoding-type"], matrix.attrs["shape"] = "csr_matrix", np.array([50, 30])
        for name, dtype in {"X/data": "f4", "X/indices": "i4", "X/indptr": "i8", "table": [("x", "f4")]}.items():
            rows = 51 if name == "X/indptr" else 50
            data = file.create_dataset(name, (rows,), dtype, chunks=(10,))
            data[: 20 if name == part else rows] = np.zeros((), dtype)
    expected = "table/x" if part == "table" else "X"
    with pytest.raises(DataError, match="3 of its 5 chunks were never written"):
        convert(tmp_path / "d.h5", tmp_path / "out.h5", columns={"x": expected})
    convert(tmp_path / "d.h5", tmp_path / "out.h5", columns={"x": expected}, trust_file=True)
