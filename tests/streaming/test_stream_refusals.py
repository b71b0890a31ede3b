"""Everything that is refused when the sequence is made, each with its message."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, UsageError


def refuse(error, text, *args, **settings):
    with pytest.raises(error, match=text) as caught:
        H5ChunkSequence(*args, **settings)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_no_file(tmp_path):
    refuse(DataError, "no such file", tmp_path / "none.h5")
    refuse(DataError, "not a file", tmp_path)
    refuse(UsageError, "path of an HDF5 file, not int", 7)
    refuse(UsageError, "not a path", "")


def test_no_hdf5(tmp_path):
    path = tmp_path / "text.h5"
    path.write_text("id,label\n1,2\n" * 100)
    refuse(DataError, "no HDF5 file", path)
    path.write_bytes(b"")
    refuse(DataError, "empty", path)


def test_truncated(numbered):
    path = numbered(rows=5000)
    path.write_bytes(path.read_bytes()[:-20_000])
    refuse(DataError, "truncated", path)


def test_missing_names_say_what_exists(write):
    path = write(train__images=np.zeros((4, 2)), train__labels=np.zeros(4))
    message = refuse(DataError, "no dataset 'train/image'", path, "train/image", "train/labels")
    assert "Did you mean 'train/images'?" in message
    assert "'train/images' (4, 2) float64; 'train/labels' (4,) float64" in message
    assert "Did you mean 'train/labels'?" in refuse(DataError, "no dataset 'labels'", path, "train/images", "labels")
    assert "Did you mean" not in refuse(DataError, "no dataset", path, "zzzzzz", None)
    refuse(DataError, "'train' is a group", path, "train", None)


def test_an_empty_file_and_a_full_one(write, tmp_path):
    h5py.File(tmp_path / "empty.h5", "w").close()
    refuse(DataError, "holds no datasets at all", tmp_path / "empty.h5")
    path = write(**{f"d{i}": np.zeros(2) for i in range(30)})
    assert "and 18 more" in refuse(DataError, "no dataset", path)


def test_lengths_that_differ(write):
    path = write(x=np.zeros((10, 2)), y=np.zeros(9))
    refuse(DataError, "'x' has 10, 'y' has 9", path)


def test_types_that_are_no_numbers(write, tmp_path):
    path = tmp_path / "types.h5"
    with h5py.File(path, "w") as file:
        file["text"] = ["a", "b"]
        file["fixed"] = np.array([b"a", b"b"])
        file["table"] = np.zeros(2, [("a", "f4"), ("b", "i4")])
        file["complex"] = np.zeros(2, complex)
        file.create_dataset("ragged", (2,), h5py.vlen_dtype(np.float32))
        file.create_dataset("reference", (2,), h5py.ref_dtype)
        file["opaque"] = np.zeros(2, "V3")
        file["type"] = np.dtype("f4")
        file["scalar"] = 3.0
        file["nothing"] = h5py.Empty("f4")
        file["norows"] = np.zeros((0, 3))
        file["nowidth"] = np.zeros((3, 0))
        file.create_dataset("unwritten", (3, 2), "f4")
        file.create_dataset("unwritten_chunks", (3, 2), "f4", chunks=(1, 2))
        file["nested"] = np.zeros((2, 2), [("a", "f4")])
    for name, text in {
        "text": "holds text",
        "fixed": "holds text",
        "table": "a table with the columns 'a', 'b'",
        "nested": "a table",
        "complex": "complex numbers",
        "ragged": "ragged",
        "reference": "references",
        "opaque": "no plain number",
        "type": "named type",
        "scalar": "single value",
        "nothing": "empty",
        "norows": r"empty: its shape is \(0, 3\)",
        "nowidth": r"empty: its shape is \(3, 0\)",
        "unwritten": "never written",
        "unwritten_chunks": "never written",
    }.items():
        refuse(DataError, text, path, name, None)


def test_other_files_are_not_followed_unasked(write, tmp_path):
    secret = write(name="secret.h5", x=np.arange(8.0))
    path = tmp_path / "links.h5"
    (tmp_path / "raw.bin").write_bytes(np.arange(8.0).tobytes())
    layout = h5py.VirtualLayout((8,), "f8")
    layout[:] = h5py.VirtualSource(str(secret), "x", (8,))
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(8.0)
        file["link"] = h5py.ExternalLink(str(secret), "x")
        file["group"] = h5py.ExternalLink(str(secret), "/")
        file["soft"] = h5py.SoftLink("/group/x")
        file["loop"] = h5py.SoftLink("/loop")
        file.create_dataset("storage", (8,), "f8", external=[(str(tmp_path / "raw.bin"), 0, 64)])
        file.create_virtual_dataset("virtual", layout)
        inside = h5py.VirtualLayout((8,), "f8")
        inside[:] = h5py.VirtualSource(".", "x", (8,))
        file.create_virtual_dataset("inside", inside)
    for name in ("link", "group/x", "soft"):
        refuse(DataError, "external link.*allow_external", path, name, None)
    refuse(DataError, "another file", path, "storage", None)
    refuse(DataError, "virtual and reads other files", path, "virtual", None)
    refuse(DataError, "loop", path, "loop", None)
    for name in ("link", "soft", "storage", "virtual"):
        sequence = H5ChunkSequence(path, name, None, allow_external=True, shuffle=False)
        assert sequence[0][0].tolist() == list(range(8)), name
    assert H5ChunkSequence(path, "inside", None, shuffle=False)[0][0].tolist() == list(range(8))


def test_hostile_names_are_shown_escaped(tmp_path):
    path = tmp_path / "hostile.h5"
    evil = "\x1b[2J\x07evil\u202e\n"
    with h5py.File(path, "w") as file:
        file[evil] = np.zeros(3)
        file["long" * 200] = np.zeros(3)
        file["table"] = np.zeros(2, [(evil, "f4")])
        file[b"\xff\xfe"] = np.zeros(2)
        file["short"] = np.zeros(2)
    message = refuse(DataError, "no dataset 'x'", path)
    assert r"\x1b[2J\x07evil\u202e\n" in message
    assert len(message) < 1500
    refuse(DataError, r"\\x1b", path, "table", None)
    refuse(DataError, r"\\x1b", path, evil, "short")
    sequence = H5ChunkSequence(path, evil, None)
    assert sequence.describe().replace("\n", "").isprintable()
    assert len(sequence[0][0]) == 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch_size": 0}, "batch_size: 0 is too small; it must be 1 or more"),
        ({"batch_size": 2.5}, "batch_size: 2.5 is not a whole number"),
        ({"batch_size": True}, "not a whole number"),
        ({"shuffle": "yes"}, "shuffle: 'yes' is neither True nor False"),
        ({"seed": -1}, "seed: -1"),
        ({"workers": -1}, "workers: -1"),
        ({"max_queue_size": 0, "workers": 2}, "max_queue_size: 0"),
        ({"nan_policy": "drop"}, "nan_policy: 'drop' is neither 'ignore' nor 'error'"),
        ({"x": []}, "x: no dataset named"),
        ({"x": {}}, "x: no dataset named"),
        ({"x": 3}, "x: give a dataset's name"),
        ({"x": ["x", 3]}, "x: 3 is not a dataset's name"),
        ({"x": "/"}, "not a dataset's name"),
        ({"x": None}, "x: name the dataset"),
        ({"y": None, "sample_weight": "y"}, "only together with y"),
        ({"scale": "1"}, "scale: '1'"),
        ({"scale": (1, 2, 3)}, "scale:"),
        ({"scale": float("nan")}, "scale:"),
        ({"scale": {"z": 1}}, "scale: 'z' is none of the datasets used \\('x', 'y'\\)"),
        ({"dtype": {"z": "stored"}}, "dtype: 'z'"),
        ({"transform": 3}, "transform: 3 cannot be called"),
        ({"transform": lambda x, y: (x, y), "use_multiprocessing": True}, "can be pickled"),
        ({"memory_budget": "much"}, "memory_budget: 'much' is not a size"),
        ({"memory_budget": "10B"}, "memory_budget: 10 B is too small .* smallest that works is"),
        ({"rows": [0, 0]}, "rows: row 0"),
    ],
)
def test_settings(numbered, settings, text):
    refuse((UsageError, DataError), text, numbered(), **settings)


def test_weights_have_one_value_a_row(write):
    path = write(x=np.zeros((4, 2)), y=np.zeros(4), w=np.zeros((4, 2, 2)))
    refuse(DataError, "one weight a row", path, sample_weight="w")


def test_keras_is_told_one_worker(numbered):
    sequence = H5ChunkSequence(numbered(), workers=4, use_multiprocessing=True)
    assert (sequence.workers, sequence.use_multiprocessing) == (1, False)
    with pytest.raises(UsageError):
        sequence.workers = 2
    with pytest.raises(UsageError):
        sequence.use_multiprocessing = True
