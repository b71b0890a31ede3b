"""Hostile model files: other files are never opened, and invalid configurations are refused before they are read."""

from __future__ import annotations

import json
import os

import h5py
import pytest

ARCHITECTURE = {
    "module": "keras", "class_name": "Sequential", "registered_name": None,
    "config": {"name": "model", "trainable": True, "layers": [
        {"module": "keras.layers", "class_name": "InputLayer", "registered_name": None,
         "config": {"name": "in", "batch_shape": [None, 8], "dtype": "float32"}},
        {"module": "keras.layers", "class_name": "Dense", "registered_name": None,
         "config": {"name": "dense", "units": 1}},
    ]},
}  # fmt: skip


def h5_model(path):
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps(ARCHITECTURE)
    return path


@pytest.mark.parametrize("soft", [False, True])
def test_model_file_opens_no_other_file(attack, tmp_path, fifo, soft):
    path = h5_model(tmp_path / "model.h5")
    with h5py.File(path, "a") as file:
        file["linked" if soft else "model_weights"] = h5py.ExternalLink(str(fifo), "/group")
        if soft:
            file["model_weights"] = h5py.SoftLink("/linked")
    assert attack("estimate", path, "--method", "formula", seconds=40).code == 0


def test_link_to_a_pipe_is_refused(attack, tmp_path, fifo):
    os.symlink(fifo, tmp_path / "model.h5")
    assert attack("estimate", tmp_path / "model.h5", seconds=40).code == 2


def test_attribute_with_many_texts_is_not_read(attack, tmp_path):
    path = h5_model(tmp_path / "model.h5")
    with h5py.File(path, "a") as file:
        file.attrs.create("keras_version", ["3.15.1"] * 3900, dtype=h5py.string_dtype())
    done = attack("estimate", path, "--method", "formula", seconds=40)
    assert done.code == 2 and "keras_version must be one text" in done.err, done.text
