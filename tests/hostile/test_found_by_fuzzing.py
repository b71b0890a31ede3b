"""Minimal cases from `scripts/fuzz`: each is an error that names the file, not a crash."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import kerasmem
from kerasmem.errors import DataError
from kerasmem.monitoring import read_timeline
from kerasmem.monitoring.log_summary import summarise


def npy(header: bytes) -> bytes:
    header = header.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


@pytest.mark.parametrize(
    "header", [b"{'descr': '<f4', (", b"(" * 117, b"'''", b"{'descr': 1/0}", b"\x00", b"{1: 2, **3}"]
)
def test_npy_header_that_is_not_python(tmp_path, header):
    (tmp_path / "x.npy").write_bytes(npy(header) + bytes(64))
    with pytest.raises(DataError, match=r"x\.npy.*not an \.npy file"):
        kerasmem.data.convert(tmp_path / "x.npy", tmp_path / "out.h5")


HEADER = b"{'descr': %s, 'fortran_order': False, 'shape': %s, }"


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [(b"('<f4', (2,))", b"(4, 2)", "contains arrays"), (b"'<f4'", b"(4, " + b"1" * 400 + b")", "its shape is")],
    ids=["an array of arrays, which NumPy neither writes nor reads", "a number that no float holds"],
)
def test_npy_header_with_invalid_values(tmp_path, kind, shape, said):
    text = (HEADER % (kind, shape)).ljust(600) + b"\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64))
    with pytest.raises(DataError, match=rf"x\.npy.*not an \.npy file.*{said}"):
        kerasmem.data.convert(tmp_path / "x.npy", tmp_path / "out.h5")


@pytest.mark.parametrize("mark", [b"PK\x01\x02", b"PK\x03\x04"], ids=["in the table of contents", "in an entry"])
def test_archive_with_invalid_utf8_name(tmp_path, mark):
    np.savez(tmp_path / "d.npz", x=np.ones((4, 2), "f4"))
    data = bytearray((tmp_path / "d.npz").read_bytes())
    flags, name = (8, 46) if mark == b"PK\x01\x02" else (6, 30)
    place = data.index(mark)
    data[place + flags + 1] |= 0x08  # it is UTF-8
    data[place + name] = 0xFF
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"d\.npz.*cannot be read: .*can't decode"):
        kerasmem.data.convert(tmp_path / "d.npz", tmp_path / "out.h5")


def test_archive_with_unnamed_entry(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.ones((4, 2), "f4"))
    data = (tmp_path / "d.npz").read_bytes()
    place = data.index(b"PK\x01\x02")  # the entry in the table of contents
    data = data[: place + 28] + b"\0\0" + data[place + 30 : place + 46] + data[place + 46 + len("x.npy") :]
    size = struct.pack("<I", int.from_bytes(data[-10:-6], "little") - len("x.npy"))
    (tmp_path / "d.npz").write_bytes(data[:-10] + size + data[-6:])
    with pytest.raises(DataError, match=r"d\.npz"):
        kerasmem.data.convert(tmp_path / "d.npz", tmp_path / "out.h5")


@pytest.mark.parametrize(
    ("field", "value"), [("run", None), ("time", None), ("phase", None), ("run", -(2**63)), ("time", 1e308)]
)
def test_log_sample_without_valid_time(tmp_path, field, value):
    sample = {"kind": "sample", "run": 0, "time": 0.5, "phase": "train", "peak_bytes": 7}
    lines = [{"kind": "run", "format_version": 1, "run": 0, "notes": []}, sample, {**sample, field: value}, sample]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    timeline = read_timeline(tmp_path / "run.jsonl")
    assert len(timeline) == 2 and any("line 3" in note for note in timeline.notes)
    assert summarise(timeline, "run.jsonl", 100).runs


def test_record_with_undecodable_error(tmp_path):
    tf = pytest.importorskip("tensorflow")
    value = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0, 2.0]))
    sound = tf.train.Example(features=tf.train.Features(feature={"x": value})).SerializeToString()
    with tf.io.TFRecordWriter(str(tmp_path / "d.tfrecord")) as writer:
        writer.write(sound)
        writer.write(b"\xff\x89" + np.arange(64, dtype="u1").tobytes())
    with pytest.raises(DataError, match=r"record 1 must be a tf\.train\.Example"):
        kerasmem.data.convert(tmp_path / "d.tfrecord", tmp_path / "out.h5")


def test_record_with_forged_length(attack, tmp_path):
    """TensorFlow's fast parser reads beyond the end of the record."""
    tf = pytest.importorskip("tensorflow")
    value = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0, 2.0]))
    sound = tf.train.Example(features=tf.train.Features(feature={"x": value})).SerializeToString()
    with tf.io.TFRecordWriter(str(tmp_path / "d.tfrecord")) as writer:
        writer.write(sound)
        writer.write(sound.replace(struct.pack("<Bff", 8, 1.0, 2.0), b"\xff\xff\xff\xff\x08" + bytes(4)))
    done = attack("data", "convert", "d.tfrecord", "-o", "out.h5")
    assert done.code == 2 and "record 1 must be a tf.train.Example" in done.err, done.text


def forge_rows(values, number, places):
    """Return a Parquet table of 50 rows with a forged number of rows, as zigzag varint, in some places.

    The footer stores 50 for the table, for the values of the column, and for its only part, in this order.
    """
    import io

    import pyarrow
    from pyarrow import parquet

    memory = io.BytesIO()
    parquet.write_table(pyarrow.table({"x": values}), memory)
    data = memory.getvalue()
    size = int.from_bytes(data[-8:-4], "little")
    pieces = data[-8 - size : -8].split(b"\x16\x64")
    assert len(pieces) == 4
    footer = pieces[0]
    for place, piece in enumerate(pieces[1:]):
        footer += (b"\x16" + number if place in places else b"\x16\x64") + piece
    return data[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1"


@pytest.mark.parametrize("places", [[0, 2], [0, 1, 2]], ids=["in the part", "everywhere"])
def test_parquet_with_forged_row_count(tmp_path, places):
    """Columns of floats are not scanned before they are written."""
    pytest.importorskip("pyarrow")
    (tmp_path / "d.parquet").write_bytes(forge_rows(np.arange(50) + 1.0, b"\xc8\x01", places))
    with pytest.raises(DataError, match=r"d\.parquet.*must have 100 rows; got 50"):
        kerasmem.data.convert(tmp_path / "d.parquet", tmp_path / "out.h5")


def test_a_record_without_values(tmp_path):
    tf = pytest.importorskip("tensorflow")
    value = tf.train.Feature(int64_list=tf.train.Int64List())
    with tf.io.TFRecordWriter(str(tmp_path / "d.tfrecord")) as writer:
        writer.write(tf.train.Example(features=tf.train.Features(feature={"x": value})).SerializeToString())
    with pytest.raises(DataError, match=r"'x' .not numbers"):
        kerasmem.data.convert(tmp_path / "d.tfrecord", tmp_path / "out.h5")
