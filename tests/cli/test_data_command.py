"""`kerasmem data`: what its commands print, their exit codes, and that hostile input is told in a line."""

from __future__ import annotations

import json
import os

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence

RNG = np.random.default_rng(0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=RNG.random((500, 8)), chunks=(100, 8), compression="gzip")
        file["y"] = np.arange(500) % 5
        file["words \x1b[31m[bold]"] = ["a"]
    return path


def pasted(out):
    """The last line, as a person pastes it."""
    lines = out.rstrip().splitlines()
    assert lines[-2] == "from kerasmem import H5ChunkSequence"
    names = {"H5ChunkSequence": H5ChunkSequence}
    exec(lines[-1], names)
    with names["train"] as train:
        return train[0]


def test_inspect(cli, file):
    done = cli("data", "inspect", file)
    assert (done.code, done.err) == (0, "")
    x, y = pasted(done.out)
    assert x.shape == (32, 8) and y.shape == (32,)
    assert "\x1b" not in done.out and "words \\x1b[31m[bold]: holds text" in done.out
    assert "gzip" in done.out
    data = json.loads(cli("data", "inspect", file, "--json", "--batch-size", 64).out)
    assert data["format_version"] == 1 and data["batch_size"] == 64
    assert {dataset["name"] for dataset in data["datasets"]} == {"x", "y", "words \x1b[31m[bold]"}


def test_convert(cli, tmp_path):
    np.save(tmp_path / "x.npy", RNG.random((400, 6)))
    np.save(tmp_path / "y.npy", np.arange(400) % 3)
    output = tmp_path / "out.h5"
    arguments = ["data", "convert", tmp_path / "x.npy", tmp_path / "y.npy", "-o", output]
    done = cli(*arguments, "--shuffle", "--compression", "gzip")
    assert (done.code, done.err) == (0, "")
    assert pasted(done.out)[0].dtype == np.float32
    refused = cli(*arguments)
    assert refused.code == 2 and "exists already" in refused.err and refused.err.count("\n") == 1
    data = json.loads(cli(*arguments, "--force", "--json").out)
    assert data["datasets"][0]["dtype"] == "float32"
    done = cli(*arguments, "--force", "--split", "0.75,0.25", "--columns", "x=x", "--columns", "y=y")
    assert done.code == 0 and "out-train.h5" in done.out and (tmp_path / "out-val.h5").exists()


def test_repack_stats(cli, file, tmp_path):
    done = cli("data", "repack", file, "-o", tmp_path / "out.h5", "--shuffle", "--float32")
    assert (done.code, done.err) == (0, "")
    assert pasted(done.out)[0].shape == (32, 8)
    assert "datasets" in json.loads(cli("data", "repack", file, "-o", tmp_path / "o2.h5", "--json").out)
    done = cli("data", "stats", file)
    assert (
        done.code == 0
        and "keras.layers.Normalization(axis=-1, mean=stats['x'].mean" in done.out
        and "class_weight = stats['y'].class_weight" in done.out
    )
    data = json.loads(cli("data", "stats", file, "--json", "--dataset", "x").out)
    assert [column["name"] for column in data["columns"]] == ["x"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspect", "none.h5"], "the file does not exist"),
        (["inspect", "evil.csv"], "not an HDF5 file"),
        (["stats", "evil.csv"], "not an HDF5 file"),
        (["repack", "evil.csv", "-o", "o.h5"], "not an HDF5 file"),
        (["convert", "evil.csv", "-o", "o.h5"], "Expected 2 columns, got 3"),
        (["convert", "evil.csv", "-o", "o.h5", "--columns", "x"], "--columns must be NAME=VALUE"),
        (["convert", "none", "-o", "o.h5"], "the file or folder does not exist"),
        (["convert", "evil.csv"], "Missing option '-o'"),
        (["convert", "-o", "o.h5"], "Missing argument 'SRC...'"),
        (["nope"], "the command must be one of inspect, convert, repack, stats, index"),
    ],
)
def test_what_is_wrong_is_told(cli, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.csv").write_text("a,b\n1,2\n3,4,\x1b[2J5\n")
    done = cli("data", *arguments)
    assert done.code == 2 and told in done.err and "Traceback" not in done.err and "\x1b" not in done.err
    assert done.out == "" and os.listdir(tmp_path) == ["evil.csv"]
