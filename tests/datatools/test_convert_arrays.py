"""`kerasmem.data.convert` from .npy and .npz keeps every value, and refuses damaged files."""

from __future__ import annotations

import io
import os
import zipfile

import numpy as np
import pytest
from converted import content, left_in, streamed

from kerasmem.data import convert
from kerasmem.errors import DataError, UsageError

RNG = np.random.default_rng(0)
X = RNG.random((500, 6, 5))


@pytest.mark.parametrize("compression", ["none", "gzip", "gzip:9", "zstd"])
def test_two_arrays_side_by_side(tmp_path, compression):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", np.arange(500))
    output = tmp_path / "out.h5"
    done = convert([tmp_path / "x.npy", tmp_path / "y.npy"], output, compression=compression, memory_budget="2MiB")
    result = content(output)
    assert result["x"].dtype == np.float32 and np.array_equal(result["x"], X.astype("f4"))
    assert result["y"].dtype == np.int64 and np.array_equal(result["y"], np.arange(500))
    assert done.rows == 500
    assert left_in(tmp_path, output, "x.npy", "y.npy") == []
    x, y = streamed(output)
    assert np.array_equal(x, X.astype("f4")) and np.array_equal(y, np.arange(500))


ARRAYS = {
    "big-endian": X.astype(">f4"),
    "fortran": np.asfortranarray(X.astype("f4")),
    "fortran-doubles": np.asfortranarray(X),
    "bool": X[:, 0] > 0.5,
    "half": X.astype("f2"),
    "bytes": (X * 255).astype("u1"),
    "big-endian-integers": (X * 1000).astype(">i2"),
    "unsigned": (X[:, 0, 0] * 2**63).astype("u8"),
    "one-number": np.arange(500, dtype="<i4"),
    "long-double": X.astype(np.longdouble),
}


@pytest.mark.parametrize("name", list(ARRAYS))
def test_kinds_of_arrays(tmp_path, name):
    array = ARRAYS[name]
    np.save(tmp_path / "a.npy", array)
    done = convert(tmp_path / "a.npy", tmp_path / "out.h5", memory_budget="2MiB")
    expected = "f4" if array.dtype.kind == "f" and array.dtype.itemsize > 4 else array.dtype.newbyteorder("=")
    result = content(tmp_path / "out.h5")["a"]
    assert result.dtype == expected and np.array_equal(result, array.astype(expected))
    assert done.line.startswith("H5ChunkSequence(") and "x='a'" in done.line


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    save(tmp_path / "d.npz", x=X, y=np.arange(500), w=X[:, 0].copy())
    convert(tmp_path / "d.npz", tmp_path / "out.h5", drop=["w*"], memory_budget="2MiB")
    assert set(content(tmp_path / "out.h5")) == {"x", "y"}
    convert(tmp_path / "d.npz", tmp_path / "all.h5", memory_budget="2MiB")
    result = content(tmp_path / "all.h5")
    assert np.array_equal(result["x"], X.astype("f4")) and np.array_equal(result["w"], X[:, 0].astype("f4"))


def test_files_with_the_same_columns_follow_one_another(tmp_path):
    for number in range(12):
        np.savez(tmp_path / f"part-{number}.npz", x=X[number * 40 : number * 40 + 40], y=np.arange(40) + 40 * number)
    done = convert(str(tmp_path / "part-*.npz"), tmp_path / "out.h5")
    assert done.rows == 480 and np.array_equal(
        content(tmp_path / "out.h5")["y"], np.arange(480)
    )  # part-2 before part-10


def test_columns_are_joined_and_renamed(tmp_path):
    np.savez(tmp_path / "d.npz", a=X[:, 0], b=np.arange(500), c=X[:, 1, :2].astype("f4"), label=np.arange(500) % 3)
    convert(tmp_path / "d.npz", tmp_path / "out.h5", columns={"y": "label", "x": "*"})
    result = content(tmp_path / "out.h5")
    expected = np.concatenate([X[:, 0].astype("f4"), np.arange(500)[:, None], X[:, 1, :2]], axis=1)
    assert np.allclose(result["x"], expected) and np.array_equal(result["y"], np.arange(500) % 3)
    convert(tmp_path / "d.npz", tmp_path / "o1.h5", columns={"pair": ["b", "label"], "alone": ["a"]})
    result = content(tmp_path / "o1.h5")
    assert np.array_equal(result["pair"], np.stack([np.arange(500), np.arange(500) % 3], axis=1))
    assert np.array_equal(result["alone"], X[:, 0].astype("f4"))
    with pytest.raises(
        UsageError, match=r"columns.*: no column of .*d.npz.* is chosen; there are 'a', 'b', 'c', 'label'"
    ):
        convert(tmp_path / "d.npz", tmp_path / "o2.h5", columns={"x": "nope"})
    with pytest.raises(UsageError, match="drop: no column matches 'nope'"):
        convert(tmp_path / "d.npz", tmp_path / "o2.h5", drop=["nope"])


def test_float64_too_large_for_float32_is_refused(tmp_path):
    x = X.copy()
    x[321, 2, 1] = -1e39
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(
        DataError, match=r"x.npy'?: 'x' holds -1e\+39 in row 321, which is too large for float32.*--no-float32"
    ):
        convert(tmp_path / "x.npy", tmp_path / "out.h5", memory_budget="2MiB", shuffle=True)
    assert left_in(tmp_path, "x.npy") == []
    convert(tmp_path / "x.npy", tmp_path / "out.h5", float32=False)
    assert np.array_equal(content(tmp_path / "out.h5")["x"], x)
    x[321, 2, 1], x[0, 0, 0] = np.inf, np.nan  # what is infinite already is no loss
    np.save(tmp_path / "x.npy", x)
    convert(tmp_path / "x.npy", tmp_path / "out.h5", force=True)
    assert np.array_equal(content(tmp_path / "out.h5")["x"], x.astype("f4"), equal_nan=True)


# ---- what is refused


def header(shape, descr="<f4", fortran=False, extra=b""):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": fortran, "shape": shape})
    return buffer.getvalue() + extra


def evil_archive(path, name="x.npy", data=None):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, header((4,), extra=bytes(16)) if data is None else data)


class Surprise:
    def __reduce__(self):
        return os.system, ("touch /tmp/kerasmem-surprise",)


def pickled():
    buffer = io.BytesIO()
    np.save(buffer, np.array([Surprise()], object), allow_pickle=True)
    return buffer.getvalue()


HOSTILE = {
    "pickled.npy": (pickled(), "pickled Python objects"),
    "cut.npy": (header((100, 8), extra=bytes(100)), "got 100 B. The file is cut off"),
    "huge.npy": (header((2**40, 2**20), extra=bytes(64)), "is cut off or damaged"),
    "overflow.npy": (header((2**62, 2**62)), "is cut off or damaged|not an .npy file"),
    "negative.npy": (header((-4, 4)), "has no rows|not an .npy file"),
    "empty.npy": (header((0, 4)), "has no rows"),
    "scalar.npy": (header((), extra=bytes(4)), "has no rows: its shape is"),
    "text.npy": (b"not an array at all", "not an .npy file"),
    "nothing.npy": (b"", "not an .npy file"),
    "code.npy": (b"\x93NUMPY\x01\x00\x40\x00" + b"__import__('os').system('true')".ljust(64), "not an .npy file"),
    "words.npy": (header((2,), "<U4", extra=bytes(32)), "must hold plain numbers; got str128"),
    "complex.npy": (header((2,), "<c8", extra=bytes(16)), r"got complex64.*np\.stack\(\[z\.real, z\.imag\], -1\)"),
    "dates.npy": (header((2,), "<M8[s]", extra=bytes(16)), "got datetime64.*drop"),
    "broken.npz": (b"PK\x03\x04 this is no archive", "not an .npy file"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_arrays(tmp_path, name):
    data, message = HOSTILE[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        convert(tmp_path / name, tmp_path / "out.h5")
    assert left_in(tmp_path, name) == [] and not os.path.exists("/tmp/kerasmem-surprise")


def test_hostile_archives(tmp_path):
    path = tmp_path / "evil.npz"
    for name, data, message in (
        ("../../escape.npy", None, "cannot be the name of a dataset"),
        ("x.npy", pickled(), "pickled Python objects"),
        ("x.npy", header((10**9, 10**6)), "is cut off or damaged"),
        ("x.npy", header((4,), extra=bytes(10**6)), "is cut off or damaged"),  # more than it says
        ("notes.txt", b"hello", "not an .npy file"),
    ):
        evil_archive(path, name, data)
        with pytest.raises(DataError, match=message):
            convert(path, tmp_path / "out.h5")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header((4,), extra=bytes(16)))
    damaged = bytearray(path.read_bytes())
    at = damaged.index(b"x.npy") + 10
    damaged[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"cannot be read|not an .npy file"):
        convert(path, tmp_path / "out.h5")
    assert left_in(tmp_path, path) == []


def test_sources_that_do_not_match_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", np.arange(499))
    with pytest.raises(DataError, match=r"'.*x.npy' has 500, '.*y.npy' has 499"):
        convert([tmp_path / "x.npy", tmp_path / "y.npy"], tmp_path / "out.h5")
    np.savez(tmp_path / "a.npz", x=X, y=np.arange(500))
    np.savez(tmp_path / "b.npz", x=X[:, 0], y=np.arange(500))
    np.savez(tmp_path / "c.npz", x=X, z=np.arange(500))
    with pytest.raises(DataError, match=r"rows of 'x' must be float64 \(6, 5\) as in .*a.npz'; got float64 \(5,\)"):
        convert([tmp_path / "a.npz", tmp_path / "b.npz"], tmp_path / "out.h5")
    with pytest.raises(DataError, match=r"side by side\): 'x' would be the name of two"):
        convert([tmp_path / "a.npz", tmp_path / "c.npz"], tmp_path / "out.h5")
    with pytest.raises(UsageError, match="must be different files"):
        convert([tmp_path / "a.npz", tmp_path / "a.npz"], tmp_path / "out.h5")
    with pytest.raises(DataError, match="the file or folder does not exist"):
        convert(tmp_path / "none.npy", tmp_path / "out.h5")
    with pytest.raises(DataError, match="no file matches this pattern"):
        convert(str(tmp_path / "none-*.npy"), tmp_path / "out.h5")
    (tmp_path / "notes.docx").write_bytes(b"x")
    with pytest.raises(UsageError, match="unknown format"):
        convert(tmp_path / "notes.docx", tmp_path / "out.h5")
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(DataError, match="is not a file or folder"):
        convert(tmp_path / "pipe.npy", tmp_path / "out.h5")


def test_outputs_are_not_overwritten_and_sources_never(tmp_path):
    source, output = tmp_path / "x.npy", tmp_path / "out.h5"
    np.save(source, X)
    output.write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"exists already.*--force"):
        convert(source, output)
    assert output.read_bytes() == b"precious"
    convert(source, output, force=True)
    before = output.read_bytes()
    os.symlink(output, tmp_path / "alias.h5")
    for name in ("out.h5", "alias.h5"):
        with pytest.raises(UsageError, match="must not be a source"):
            convert(output, tmp_path / name, force=True)
    assert output.read_bytes() == before
    for bad, message in (
        ("no/where.h5", "does not exist; create it first"),
        (".", "must be a file"),
        ("a\0b", "is not a path"),
    ):
        with pytest.raises(UsageError, match=message):
            convert(source, os.path.join(tmp_path, bad))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compression": "rar"}, "compression must be none, gzip, zstd"),
        ({"compression": "gzip:12"}, "levels 1 to 9"),
        ({"split": "0.8,0.3"}, "two or three shares that add up to 1"),
        ({"split": "nan,1"}, "two or three shares that add up to 1"),
        ({"split": "0.8,x"}, "two or three shares that add up to 1"),
        ({"split": "0.999999,0.000001"}, "a share of 500 rows is empty"),
        ({"image_size": "large"}, "image_size must be WIDTHxHEIGHT"),
        ({"color": "sepia"}, "color must be 'rgb' or 'gray'; got 'sepia'"),
        ({"seed": -1}, "seed must be .* at least 0; got -1"),
    ],
)
def test_settings_that_are_wrong(tmp_path, settings, message):
    np.save(tmp_path / "x.npy", X)
    with pytest.raises((UsageError, DataError), match=message):
        convert(tmp_path / "x.npy", tmp_path / "out.h5", **settings)
    assert left_in(tmp_path, "x.npy") == []
