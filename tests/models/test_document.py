"""Files that are not what they seem: one clear message each, exit 2, and nothing of theirs runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile

import h5py
import numpy as np
import pytest

from kerasmem.errors import ModelFileError
from kerasmem.models import document
from kerasmem.models.document import read_document


def keras_archive(path, members: dict[str, bytes | str]):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_reads_each_kind_whatever_the_name_ends_with(mnist_cnn, tmp_path):
    mnist_cnn.save(tmp_path / "model.h5")
    mnist_cnn.save(tmp_path / "model.keras")
    (tmp_path / "model.json").write_text(mnist_cnn.to_json())
    for name in ("model.h5", "model.keras", "model.json"):
        (tmp_path / name).rename(tmp_path / f"{name}.renamed")
        assert read_document(tmp_path / f"{name}.renamed").config["class_name"] == "Sequential"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.h5", "the file does not exist"), ("empty.h5", "is empty"), ("model\0.h5", "cannot be read"),
        ("", "got an empty text"), ("http://x/y.h5", "must be a local file"),
    ],
)  # fmt: skip
def test_paths_without_a_model(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.h5").touch()
    with pytest.raises(ModelFileError, match=message):
        read_document(path)


def test_a_loss_nested_too_deeply_is_no_crash(tmp_path):
    from kerasmem.estimation.estimating import estimate

    layer = {"class_name": "InputLayer", "module": "keras.layers", "config": {"batch_shape": [None, 2], "name": "i"}}
    model = {"module": "keras", "class_name": "Sequential", "config": {"name": "m", "layers": [layer]}}
    loss = "[" * 900 + '"mse"' + "]" * 900
    text = json.dumps(model)[:-1] + f', "compile_config": {{"optimizer": "adam", "loss": {loss}}}}}'
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"m\.json.*nested too deeply"):
        estimate(tmp_path / "m.json")


def test_folders(tmp_path):
    with pytest.raises(ModelFileError, match="is a folder"):
        read_document(tmp_path)
    (tmp_path / "saved_model.pb").touch()
    with pytest.raises(ModelFileError, match=r"SavedModel.*--factory"):
        read_document(tmp_path)


def test_a_pipe_does_not_make_it_wait(tmp_path):
    os.mkfifo(tmp_path / "model.h5")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_document(tmp_path / "model.h5")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.h5", b"this is not HDF5 at all", "not a Keras model .*or damaged"),
        ("model.keras", b"\x00\x01\x02", "not a Keras model .*or damaged"),
        ("model.pkl", pickle.dumps({"a": 1}), "pickle"),
        ("model.tflite", b"\x1c\x00\x00\x00TFL3\x00\x00", "TensorFlow Lite"),
        ("model.ckpt.index", b"\x00\x00\x01", "checkpoint"),
        ("train.py", b"import keras", r"name the function .*train\.py:build_model"),
        ("model.onnx", b"\x08\x07\x12\x07pytorch", "not a Keras model"),
        ("model.json", b"{ not json", "not valid JSON"),
        ("model.json", b"[1, 2]", "must be a JSON object; got list"),
        ("model.json", b'{"a": 1}', "must have class_name and config"),
        ("model.json", b"[" * 200_000, "nested too deeply"),
        ("model.json", b'{"class_name": "\xff\xfe"', "not valid JSON"),
    ],
)
def test_other_things_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        read_document(tmp_path / name)


def test_truncated_h5_at_every_length(mnist_cnn, tmp_path):
    mnist_cnn.save(tmp_path / "model.h5")
    whole = (tmp_path / "model.h5").read_bytes()
    for length in [10, 100, 511, 512, 600, 1000, 2000, 4000, 8000, 100_000, len(whole) - 1]:
        (tmp_path / "cut.h5").write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"cut\.h5"):
            read_document(tmp_path / "cut.h5")


def test_h5_without_a_model(tmp_path, mnist_cnn):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.zeros(10)
    with pytest.raises(ModelFileError, match="no attribute model_config"):
        read_document(tmp_path / "data.h5")
    mnist_cnn.save_weights(tmp_path / "only.weights.h5")
    with pytest.raises(ModelFileError, match=r"without an architecture.*--factory"):
        read_document(tmp_path / "only.weights.h5")


@pytest.mark.parametrize("value", [np.arange(5), 7, b"not json", "[]", "3", np.bytes_(b" " * 5000 + b"{}")])
def test_h5_with_a_config_that_is_none(tmp_path, monkeypatch, value):
    monkeypatch.setattr(document, "MAX_CONFIG_BYTES", 1000)
    with h5py.File(tmp_path / "model.h5", "w") as file:
        file.attrs["model_config"] = value
    with pytest.raises(ModelFileError, match="model_config"):
        read_document(tmp_path / "model.h5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: 0xFF, 3: 0xFF}, "model_config must have at most"),
        ({4: 0xFF}, "damaged or cut short"),
        ({12: 9}, "damaged or cut short"),
    ],
    ids=["its length", "its heap", "its number in the heap"],
)
def test_h5_config_whose_place_is_damaged(tmp_path, change, message):
    """HDF5 takes as much memory as the text says that it has: 4 GiB."""
    with h5py.File(tmp_path / "model.h5", "w") as file:
        file.attrs["model_config"] = "[" * 300
    data = bytearray((tmp_path / "model.h5").read_bytes())
    element = data.index((300).to_bytes(4, "little"), data.index(b"model_config"))
    for offset, byte in change.items():
        data[element + offset] = byte
    (tmp_path / "model.h5").write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        read_document(tmp_path / "model.h5")


def test_h5_config_among_many_attributes(tmp_path):
    """More than eight attributes are stored outside the header of the group."""
    with h5py.File(tmp_path / "model.h5", "w", libver="latest") as file:
        for number in range(20):
            file.attrs[f"attribute_{number}"] = "x" * 5000
        file.attrs["model_config"] = '{"a": 1}'
    assert read_document(tmp_path / "model.h5").config == {"a": 1}


@pytest.mark.parametrize("declared", [50_000_001, 1000], ids=["as it is", "as if it were small"])
def test_zip_bomb(tmp_path, monkeypatch, declared):
    monkeypatch.setattr(document, "MAX_CONFIG_BYTES", 1_000_000)
    path = keras_archive(tmp_path / "bomb.keras", {"config.json": b"[" + b" " * 50_000_000})
    size, other = ((number).to_bytes(4, "little") for number in (50_000_001, declared))
    path.write_bytes(path.read_bytes().replace(size, other))
    with pytest.raises(ModelFileError, match=r"must have at most|damaged"):
        read_document(path)


def test_archives_that_are_no_models(tmp_path, mnist_cnn):
    with pytest.raises(ModelFileError, match=r"must contain config\.json"):
        read_document(keras_archive(tmp_path / "other.keras", {"a.txt": "b"}))
    with pytest.raises(ModelFileError, match="not valid JSON"):
        read_document(keras_archive(tmp_path / "broken.keras", {"config.json": "{"}))
    mnist_cnn.save(tmp_path / "model.keras")
    whole = (tmp_path / "model.keras").read_bytes()
    for length in (10, 1000, len(whole) - 30):
        (tmp_path / "cut.keras").write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match="damaged or cut short"):
            read_document(tmp_path / "cut.keras")
    data = bytearray(whole)
    start = data.find(b"config.json") + 30
    data[start : start + 60] = os.urandom(60)
    (tmp_path / "flipped.keras").write_bytes(data)
    with pytest.raises(ModelFileError):
        read_document(tmp_path / "flipped.keras")


def test_encrypted_archive(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("config.json", "{}")
    data = bytearray(buffer.getvalue())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(signature) + offset] |= 1
    (tmp_path / "locked.keras").write_bytes(data)
    with pytest.raises(ModelFileError, match="damaged"):
        read_document(tmp_path / "locked.keras")
