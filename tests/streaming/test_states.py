"""Saved states resume at the next batch, and refuse other settings."""

from __future__ import annotations

import json
import os

import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, UsageError

ROWS = 203


def targets(batches):
    return [batch[1].tolist() for batch in batches]


def stream(path, **settings):
    return H5ChunkSequence(path, **{"batch_size": 8, "memory_budget": "3kB", **settings})


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("at", [1, 26, 40])
def test_a_state_resumes_at_the_next_batch(numbered, tmp_path, at, workers):
    path = numbered(rows=ROWS, chunks=4)
    whole = stream(path)
    expected = targets(whole.next_epoch()) + targets(whole.next_epoch())
    first = stream(path, workers=workers)
    got, epoch = [], first.next_epoch()
    while len(got) < at:
        batch = next(epoch, None)
        if batch is None:
            epoch = first.next_epoch()
        else:
            got.append(batch[1].tolist())
    text = json.dumps(first.state_dict())
    assert len(text.encode()) < 1024
    os.rename(path, tmp_path / "moved.h5")
    second = stream(tmp_path / "moved.h5", workers=workers)
    second.load_state_dict(json.loads(text))
    while len(got) < 52:
        got += targets(second.next_epoch())
    assert got == expected
    first.close(), second.close()


def test_a_state_in_tf_data(numbered):
    path = numbered(rows=ROWS, chunks=4)
    expected = targets(stream(path).next_epoch())
    second = stream(path)
    second.load_state_dict(second.state_dict(epoch=0, batch=20))
    data = second.as_tf_dataset()
    assert targets(data.as_numpy_iterator()) == expected[20:]
    assert len(targets(data.as_numpy_iterator())) == 26


def test_a_loaded_state_in_fit_without_the_callback(numbered, recwarn):
    from streams import RowModel

    path = numbered(rows=ROWS, chunks=4)
    expected = [row for epoch in range(2) for place in range(26) for row in stream(path).batch_rows(place, epoch)]
    for shuffle in (True, False):
        sequence, model = stream(path), RowModel()
        sequence.load_state_dict(sequence.state_dict(epoch=0, batch=20))
        model.fit(sequence, epochs=2, shuffle=shuffle, verbose=0)
        assert model.trained == expected[160:]


def test_a_drawn_seed_is_adopted_from_the_state(numbered):
    path = numbered(rows=ROWS, chunks=4)
    first, second = stream(path, seed=None), stream(path, seed=None)
    assert targets(first) != targets(second)
    second.load_state_dict(first.state_dict())
    assert targets(first) == targets(second)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch_size": 9}, "batch_size was 8 when it was saved and is 9 now"),
        ({"seed": 1}, "seed was 0 when it was saved and is 1 now"),
        ({"shuffle": False}, "shuffle was True"),
        ({"remainder": "drop"}, "remainder was 'keep'"),
        ({"rows": (0, 100)}, "selection was .*`rows`"),
        ({"memory_budget": "1MB"}, "windows was .*memory_budget"),
        ({"shard": (1, 2)}, r"shard was \[0, 1\] .* and is \[1, 2\]"),
        ({"y": "x"}, "datasets was"),
        ({"x": ["x", "y"], "y": None}, "datasets was"),
        ({"x": ["x"]}, "datasets was"),
        ({"scale": 0.5}, r"scale was \[None, None\] when it was saved and is \[\[0.5, 0.0\], None\] now"),
        ({"dtype": "float16"}, r"dtype was \['float32', 'int64'\]"),
    ],
)
def test_states_of_other_settings_are_refused(numbered, settings, text):
    path = numbered(rows=ROWS, chunks=4)
    state = json.loads(json.dumps(stream(path).state_dict()))
    with pytest.raises(UsageError, match=f"state: {text}"):
        stream(path, **settings).load_state_dict(state)
    stream(path, workers=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format_version": 2}, "format_version must be 1; got 2"),
        ({"epoch": -1}, "epoch must be a whole number from 0; got -1"),
        ({"batch": 26}, "batch must be below 26"),
        ({"batch": "1"}, "batch must be a whole number"),
        ({"agrees": None}, "must be the result of state_dict"),
    ],
)
def test_damaged_states_are_refused(numbered, change, text):
    sequence = stream(numbered(rows=ROWS, chunks=4))
    with pytest.raises(DataError, match=text):
        sequence.load_state_dict({**sequence.state_dict(), **change})
    with pytest.raises(UsageError, match="both epoch and batch"):
        sequence.state_dict(epoch=1)
