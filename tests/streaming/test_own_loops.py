"""Custom loops over a sequence, and subclasses."""

from __future__ import annotations

import pytest
from streams import RowModel

from kerasmem import H5ChunkSequence
from kerasmem.errors import UsageError

ROWS = 200


@pytest.fixture
def path(numbered):
    return numbered(rows=ROWS, chunks=8)


def stream(path, kind=H5ChunkSequence, **settings):
    return kind(path, batch_size=8, memory_budget="4kB", **settings)


def expected(path, epochs=3):
    plain = stream(path)
    return [[row for batch in range(25) for row in plain.batch_rows(batch, epoch)] for epoch in range(epochs)]


def rows(batches):
    return [int(row) for _, y in batches for row in y]


def loop_then_end(train):
    """Ending an epoch after a loop changes nothing."""
    got = rows(train)
    train.on_epoch_end()
    train.on_epoch_end()
    return got


def indices(train):
    train.on_epoch_begin()
    got = rows(train[place] for place in range(len(train)))
    train.on_epoch_end()
    return got


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("read", [rows, loop_then_end, indices])
def test_each_loop_is_another_epoch(path, workers, read):
    with stream(path, workers=workers) as train:
        assert [read(train) for _ in range(3)] == expected(path)
        assert train.epoch == 3


def test_a_loop_that_was_left_uses_its_epoch_up(path):
    train = stream(path)
    for _ in train:
        break
    assert rows(train) == expected(path)[1]


def test_a_loop_and_fit_count_on(path):
    train, model = stream(path), RowModel()
    first = rows(train)
    model.fit(train, verbose=0)
    assert [first, model.trained, rows(train)] == expected(path)


def test_an_overridden_getitem_is_refused():
    with pytest.raises(UsageError, match=r"Doubled: .* transform="):

        class Doubled(H5ChunkSequence):
            def __getitem__(self, index):
                return super().__getitem__(index)


class Counted(H5ChunkSequence):
    """A subclass with hooks that do not call super(), as is usual with Keras."""

    begun = ended = 0

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


class Evaluated(H5ChunkSequence):
    """A subclass that evaluates a model when an epoch begins."""

    model = None

    def on_epoch_begin(self):
        model, self.model = self.model, None
        if model is not None:
            model.evaluate(self, verbose=0)
        super().on_epoch_begin()


def test_a_hook_that_evaluates_changes_no_epoch(path):
    train, model = stream(path, Evaluated), RowModel()
    train.model = RowModel()
    model.fit(train, verbose=0)
    assert (model.trained, train.epoch, train[0][1].tolist()) == (expected(path)[0], 1, expected(path)[1][:8])


def test_hooks_need_not_call_their_base(path):
    train, model = stream(path, Counted), RowModel()
    model.fit(train, epochs=3, verbose=0)
    assert [model.trained[k * ROWS :][:ROWS] for k in range(3)] == expected(path)
    assert (train.begun, train.ended) == (3, 4)
