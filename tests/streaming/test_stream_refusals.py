"""Errors when a sequence is created."""

from __future__ import annotations

import threading

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.filters import Scratch


def refuse(error, text, *args, **settings):
    with pytest.raises(error, match=text) as caught:
        H5ChunkSequence(*args, **settings)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_files_that_are_not_complete_hdf5_are_refused(numbered, tmp_path):
    refuse(DataError, "the file does not exist", tmp_path / "none.h5")
    refuse(DataError, "not a file", tmp_path)
    refuse(UsageError, "must be a path, a pattern or a list of paths; got int", 7)
    refuse(UsageError, "not a path", "")
    path = numbered(rows=5000)
    for content, text in (
        (path.read_bytes()[:-20_000], "truncated"),
        (b"id,1\n" * 99, "not an HDF5 file"),
        (b"", "empty"),
    ):
        path.write_bytes(content)
        refuse(DataError, text, path)


def test_errors_of_missing_names_list_the_datasets(write):
    path = write(train__images=np.zeros((4, 2)), train__labels=np.zeros(4))
    message = refuse(DataError, "no dataset 'train/image'", path, "train/image", "train/labels")
    assert "It holds: 'train/images' (4, 2); 'train/labels' (4,)" in message
    refuse(DataError, "'train' is a group or a type, not a dataset", path, "train", None)


def test_an_empty_file_and_a_full_one(write, tmp_path):
    h5py.File(tmp_path / "empty.h5", "w").close()
    refuse(DataError, "holds no datasets at all", tmp_path / "empty.h5")
    path = write(**{f"d{i}": np.zeros(2) for i in range(30)})
    assert "and 18 more" in refuse(DataError, "no dataset", path)


def test_types_other_than_numbers_are_refused(tmp_path):
    path = tmp_path / "types.h5"
    cases = [
        (["a", "b"], "holds text"),
        (np.array([b"a", b"b"]), "holds text"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "a table with the columns 'a', 'b'"),
        (np.zeros((2, 2), [("a", "f4")]), "a table"),
        (np.zeros(2, complex), "complex128 values"),
        (np.zeros(2, "V3"), r"holds \|V3 values"),
        (np.dtype("f4"), "not a dataset"),
        (3.0, "single value"),
        (h5py.Empty("f4"), "empty"),
        (np.zeros((0, 3)), r"empty .*shape \(0, 3\)"),
        (np.zeros((3, 0)), r"empty .*shape \(3, 0\)"),
        ({"dtype": h5py.vlen_dtype(np.float32)}, "ragged"),
        ({"dtype": h5py.ref_dtype}, "references"),
        ({"dtype": "f4"}, "never written"),
        ({"dtype": "f4", "chunks": (1,)}, "never written"),
    ]
    with h5py.File(path, "w") as file:
        for number, (content, _) in enumerate(cases):
            if isinstance(content, dict):
                file.create_dataset(f"x{number}", (2,), **content)
            else:
                file[f"x{number}"] = content
    for number, (_, text) in enumerate(cases):
        refuse(DataError, text, path, f"x{number}", None)


def test_links_to_other_files_need_trust_file(write, tmp_path):
    secret = write(name="secret.h5", x=np.arange(8.0))
    path = tmp_path / "links.h5"
    (tmp_path / "raw.bin").write_bytes(np.arange(8.0).tobytes())
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(8.0)
        file["link"] = h5py.ExternalLink(str(secret), "x")
        file["group"] = h5py.ExternalLink(str(secret), "/")
        file["soft"] = h5py.SoftLink("/group/x")
        file["loop"] = h5py.SoftLink("/loop")
        file.create_dataset("storage", (8,), "f8", external=[(str(tmp_path / "raw.bin"), 0, 64)])
        virtual(file, "virtual", str(secret), "x")
        virtual(file, "inside", ".", "x")
    for name in ("link", "group/x", "soft"):
        refuse(DataError, "external link.*trust_file", path, name, None)
    refuse(DataError, "another file", path, "storage", None)
    for name in ("virtual", "inside"):
        refuse(DataError, "is virtual.*trust_file", path, name, None)
    refuse(DataError, "loop", path, "loop", None)
    for name in ("link", "soft", "storage", "virtual", "inside"):
        sequence = H5ChunkSequence(path, name, None, trust_file=True, shuffle=False)
        assert sequence[0][0].tolist() == list(range(8)), name


def test_rows_without_storage_or_fill_value_are_zeros(tmp_path, monkeypatch):
    take = Scratch.take

    def take_used(self, name, size):
        buffer = take(self, name, size)
        buffer.fill(0x41)
        return buffer

    monkeypatch.setattr(Scratch, "take", take_used)
    path = tmp_path / "never.h5"
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)  # as netCDF's `nofill`: HDF5 leaves the buffer as it is
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(1.0, 101)
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((100,)), creation)
    with (
        pytest.warns(UserWarning, match="never written") as warned,
        H5ChunkSequence(path, trust_file=True) as train,
    ):
        assert not np.concatenate([x for x, _ in train.next_epoch()]).any()
    assert warned[0].filename == __file__


def virtual(file, name, source, dataset, rows=8, of=8):
    layout = h5py.VirtualLayout((rows,), "f8")
    layout[:of] = h5py.VirtualSource(source, dataset, (of,))
    file.create_virtual_dataset(name, layout)


def test_parts_that_were_never_written_are_refused_or_warned_about(write, tmp_path):
    path = tmp_path / "parts.h5"
    write(name="there.h5", x=np.ones(4))
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (100, 3), "f4", chunks=(10, 2))
        x[:55] = 1
        file["y"] = np.arange(100.0)
        full = file.create_dataset("full", (95, 3), "f4", chunks=(10, 2))
        full[:] = 1
        virtual(file, "gone", "gone.h5", "x")
        virtual(file, "covered", "there.h5", "x", 4, 4)
        virtual(file, "half", "there.h5", "x", 8, 4)
    refuse(DataError, "8 of its 20 chunks were never written.*trust_file=True", path)
    with pytest.warns(UserWarning, match="not complete: 8 of its 20 chunks"):
        x, _ = H5ChunkSequence(path, batch_size=100, shuffle=False, trust_file=True)[0]
    assert x.sum() == 60 * 0 + 55 * 3
    H5ChunkSequence(path, "full", None)
    for name, text in {"gone": "'gone.h5' is missing", "half": "cover 4 of its 8"}.items():
        with pytest.warns(UserWarning, match=text):
            H5ChunkSequence(path, name, None, trust_file=True, shuffle=False)[0]
    assert len(H5ChunkSequence(path, "covered", None, trust_file=True)[0][0]) == 4


def test_orders_larger_than_memory_are_refused(tmp_path):
    path = tmp_path / "sparse.h5"
    with h5py.File(path, "w") as file:
        for name, shape in {"x": (10**15, 1), "y": (10**15,)}.items():
            file.create_dataset(name, shape, "f4", chunks=(4096, *shape[1:]))[5] = 1
    refuse(DataError, "244,140,624,999 of its 244,140,625,000 chunks", path)
    with pytest.warns(UserWarning, match="not complete"):
        refuse(DataError, "order of .* blocks .* would take 1?[0-9.]+ TiB", path, trust_file=True)
        assert len(H5ChunkSequence(path, rows=(0, 5000), trust_file=True, shuffle=False)[0][1]) == 32


@pytest.mark.parametrize(
    ("code", "way_out"), [(32001, r"pip install 'kerasmem\[codecs\]', or rewrite"), (32768, "rewrite the dataset")]
)
def test_filters_that_are_not_installed(tmp_path, monkeypatch, code, way_out):
    path = tmp_path / "filter.h5"
    monkeypatch.setattr("kerasmem.hdf5.rows.scan.register_filters", lambda: False)
    monkeypatch.setattr("kerasmem.hdf5.rows.scan.is_undone_here", lambda code: False)  # as without kerasmem[codecs]
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((10,))
    if h5py.h5z.filter_avail(code):
        pytest.skip("this filter is installed")
    creation.set_filter(code, h5py.h5z.FLAG_OPTIONAL, ())  # writable without: HDF5 leaves it out
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((10,))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_FLOAT, space, creation)
        file["x"][:] = 1
    refuse(DataError, rf"filter .*{code}.* not installed: {way_out}", path, "x", None)


def test_types_without_a_numpy_type_are_refused(tmp_path):
    path = tmp_path / "time.h5"
    with h5py.File(path, "w") as file:
        h5py.h5d.create(file.id, b"time", h5py.h5t.UNIX_D64LE, h5py.h5s.create_simple((5,)))
        file["times"] = np.arange(5.0)
    refuse(DataError, "type that NumPy lacks.*float64", path, "time", None)
    refuse(DataError, r"It holds: 'time' \(5,\); 'times' \(5,\)", path, "tims", None)


def test_names_may_be_any_bytes(tmp_path):
    path = tmp_path / "names.h5"
    with h5py.File(path, "w") as file:
        file[b"x\xff"] = np.arange(4.0)
        file["größe"] = np.arange(4.0)
    assert r"'x\udcff' (4,)" in refuse(DataError, "no dataset", path, "zzz", None)
    sequence = H5ChunkSequence(path, "x\udcff", "größe", shuffle=False)
    assert sequence[0][0].tolist() == sequence[0][1].tolist() == [0, 1, 2, 3]
    refuse(DataError, "no dataset", path, "y\udcff", None)
    refuse(DataError, "no dataset", path, "y\ud800", None)


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
        ({"batch_size": 0}, "batch_size must be .* at least 1; got 0"),
        ({"shuffle": "yes"}, "shuffle must be True or False; got 'yes'"),
        ({"seed": -1}, "seed must be .*got -1"),
        ({"workers": -1}, "workers must be .*got -1"),
        ({"remainder": True}, "remainder must be 'keep', 'drop' or 'pad'; got True"),
        ({"remainder": "pad", "y": None}, "remainder: 'pad' needs y"),
        ({"remote": {"cache": "c"}}, "remote: .* leave it out"),
        ({"x": []}, "x must name at least one dataset"),
        ({"x": ["x", 3]}, "x must be a dataset name .* got 3"),
        ({"x": "/"}, "got '/'"),
        ({"x": None}, "x must be the name of a dataset"),
        ({"y": None, "sample_weight": "y"}, "sample_weight needs y"),
        ({"scale": {"z": 1}}, "scale must be keyed by 'x', 'y'; got 'z'"),
        ({"dtype": {"z": "stored"}}, "dtype must be keyed by .* got 'z'"),
        ({"dtype": None}, "dtype must be one of float32.* got None"),
        ({"scale": 10**400}, "scale must be .* got 1000"),
        ({"trust_file": 1}, "trust_file must be True or False; got 1"),
        ({"transform": 3}, "transform must be a function; got 3"),
        ({"memory_budget": "much"}, "memory_budget must be a size .*got 'much'"),
        ({"memory_budget": "10B"}, "memory_budget: 10 B is too small .* smallest that works is"),
        ({"rows": [0, 0]}, "rows: row 0"),
    ],
)
def test_settings(numbered, settings, text):
    refuse((UsageError, DataError), text, numbered(), **settings)


def test_a_transform_that_cannot_be_pickled(numbered):
    stream = H5ChunkSequence(numbered(), transform=threading.Lock().acquire, use_multiprocessing=True)
    with pytest.raises(UsageError, match="transform cannot be pickled"):
        stream[0]


def test_weights_have_one_value_a_row(write):
    path = write(x=np.zeros((4, 2)), y=np.zeros(4), w=np.zeros((4, 2, 2)), v=np.zeros((4, 3)), u=np.zeros((4, 1)))
    refuse(DataError, "one weight per row", path, sample_weight="w")
    refuse(DataError, r"shape \(4,\) or \(4, 1\); .* has shape \(4, 3\)", path, sample_weight="v")
    assert H5ChunkSequence(path, sample_weight="u")[0][2].shape == (4, 1)
