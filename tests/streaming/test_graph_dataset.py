"""The rows of a sequence as a graph of TensorFlow's own operations: the same values, each row once, no Python."""

from __future__ import annotations

import collections

import h5py
import numpy as np
import pytest
import tensorflow as tf
from streams import slow_double

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, UsageError

TYPES = ("u1", "i2", ">i4", "u4", "u8", "f4", ">f8", "f2", "?")


def all_rows(data):
    return [row for batch in data.as_numpy_iterator() for row in batch[1].tolist()]


@pytest.mark.parametrize("chunks", [None, 4])
@pytest.mark.parametrize("settings", [{}, {"shuffle": False}, {"rows": (30, 170)}, {"shard": (1, 3)}])
def test_each_row_once_an_epoch(numbered, chunks, settings):
    sequence = H5ChunkSequence(numbered(rows=203, chunks=chunks), batch_size=16, memory_budget="6kB", **settings)
    wanted = sorted(row for place in range(len(sequence)) for row in sequence.batch_rows(place).tolist())
    assert sorted(all_rows(sequence.as_service_dataset())) == wanted
    twice = all_rows(sequence.as_service_dataset(epochs=2))
    assert collections.Counter(twice) == dict.fromkeys(wanted, 2)
    if sequence.shuffle:
        assert twice[: len(wanted)] != sorted(wanted)
        assert twice[: len(wanted)] != twice[len(wanted) :]
    for x, y in sequence.as_service_dataset().as_numpy_iterator():
        assert len(y) <= 16
        assert (x == y[:, None]).all()


def test_every_type_comes_as_from_the_sequence(tmp_path):
    path, names = tmp_path / "types.h5", []
    values = np.arange(300 * 6).reshape(300, 2, 3) % 251
    with h5py.File(path, "w") as file:
        for number, kind in enumerate(TYPES):
            names.append(f"a{number}")
            file.create_dataset(names[-1], data=values.astype(kind), chunks=(7, 2, 3))
        file["y"] = np.arange(300)
    settings = {"batch_size": 300, "shuffle": False, "scale": {"a0": (1 / 255, 0.5)}, "dtype": {"a3": "stored"}}
    sequence = H5ChunkSequence(path, x=names, **settings)
    ((wanted, _),) = sequence
    ((found, _),) = sequence.as_service_dataset().as_numpy_iterator()
    for one, other in zip(wanted, found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other, one, rtol=1e-6)


def test_several_files_and_a_dropped_remainder(tmp_path):
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = np.ones((25, 3)), np.arange(25) + 100 * number
    sequence = H5ChunkSequence(str(tmp_path / "*.h5"), batch_size=8, remainder="drop")
    batches = [y for _, y in sequence.as_service_dataset().as_numpy_iterator()]
    assert [len(y) for y in batches] == [8] * 6
    assert len({row for y in batches for row in y.tolist()}) == 48


@pytest.mark.parametrize("shuffled", [True, False])
def test_data_packed_by_gzip_is_unpacked_chunk_by_chunk(tmp_path, shuffled):
    values = np.arange(300 * 6).reshape(300, 2, 3) % 251
    with h5py.File(tmp_path / "packed.h5", "w") as file:
        for number, kind in enumerate(TYPES):
            options = {"chunks": (7 + number % 2, 2, 3), "compression": "gzip", "shuffle": shuffled}
            file.create_dataset(f"a{number}", data=values.astype(kind), **options)
        file.create_dataset("y", data=np.arange(300), chunks=(64,), compression="gzip", shuffle=shuffled)
    names = [f"a{number}" for number in range(len(TYPES))]
    for settings in ({}, {"rows": (3, 290)}):
        sequence = H5ChunkSequence(
            tmp_path / "packed.h5", x=names, batch_size=300, shuffle=False, memory_budget="1MiB", **settings
        )
        ((wanted, rows),) = sequence
        ((found, ours),) = sequence.as_service_dataset().as_numpy_iterator()
        assert ours.tolist() == rows.tolist()
        for one, other in zip(wanted, found, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(other, one, rtol=1e-6)
    mixed = H5ChunkSequence(tmp_path / "packed.h5", x=names[0], batch_size=32, memory_budget="1MiB")
    assert sorted(all_rows(mixed.as_service_dataset(epochs=2))) == sorted([*range(300), *range(300)])


def test_the_service_sends_each_row_in_even_batches(numbered):
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    reader = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    sequence = H5ChunkSequence(numbered(rows=400), batch_size=16, memory_budget="6kB")
    data = sequence.as_service_dataset().apply(service.distribute("dynamic", dispatcher.target)).rebatch(16)
    batches = [y.tolist() for _, y in data.as_numpy_iterator()]
    assert [len(batch) for batch in batches] == [16] * 25
    assert sorted(row for batch in batches for row in batch) == list(range(400))
    del reader


def test_the_graph_holds_no_python(numbered):
    graph = H5ChunkSequence(numbered()).as_service_dataset()._as_serialized_graph()
    text = tf.compat.v1.GraphDef.FromString(graph.numpy())
    operations = {node.op for node in text.node} | {node.op for body in text.library.function for node in body.node_def}
    assert "FixedLengthRecordDatasetV2" in operations
    assert not {name for name in operations if "Py" in name or "Generator" in name}


def test_what_cannot_be_served_is_refused(numbered):
    packed = numbered(name="packed.h5", options={"x": {"compression": "lzf"}})
    with pytest.raises(DataError, match=r"'x' is compressed by another.*kerasmem data repack --compression none"):
        H5ChunkSequence(packed).as_service_dataset()
    with pytest.raises(UsageError, match=r"transform: .* leave it out"):
        H5ChunkSequence(numbered(), transform=slow_double).as_service_dataset()
    with pytest.raises(UsageError, match=r"check_finite: .* leave it out"):
        H5ChunkSequence(numbered(), check_finite=True).as_service_dataset()
    with pytest.raises(UsageError, match="epochs: 0 is too small"):
        H5ChunkSequence(numbered()).as_service_dataset(epochs=0)
