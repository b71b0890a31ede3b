"""One order for any number of workers: the same batches, every row once, gone on with by more or fewer."""

from __future__ import annotations

import json
import tracemalloc
from math import ceil

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence, ResumeTraining
from kerasmem.errors import UsageError
from kerasmem.streaming.elastic import ElasticOrder, GlobalBatches
from kerasmem.streaming.order import Blocks, Segment

COUNTS = (1, 2, 3, 4, 8)


def orders(rows, batch, block, lanes, window, drop, count, *, seed=3, epoch=0):
    selection = rows if isinstance(rows, np.ndarray) else range(rows)
    blocks = Blocks(selection, block)
    for index in range(count):
        share = GlobalBatches(index, count, len(selection), batch, drop, lanes, window, may_be_empty=True)
        yield share, ElasticOrder(share, blocks, seed, epoch)


def global_batches(made):
    """Return the rows of each batch of all workers, and check that each worker's windows hold what it delivers."""
    made = list(made)
    batches = []
    for place in range(made[0][0].steps):
        parts = []
        for share, order in made:
            start, stop = share.bounds(place, order.total)
            if start < stop:
                parts.append(order.rows(start, stop))
        batches.append(np.concatenate(parts).tolist())
    return batches


def cases(count=24):
    random = np.random.default_rng(1)
    while count:
        rows, block = int(random.integers(60, 900)), int(random.integers(1, 30))
        batch, lanes = int(random.integers(8, 40)), int(random.choice([1, 2, 4, 6]))
        window = int(random.integers(1, 8))
        if lanes > 1 and window * (batch // lanes) < block:
            continue
        chosen = np.sort(random.choice(2 * rows, rows, replace=False)).astype(np.int64) if count % 3 == 0 else rows
        yield chosen, batch, block, lanes, max(window, ceil(block / batch)), bool(count % 2)
        count -= 1


def test_any_number_of_workers_delivers_the_same_batches_and_every_row_once():
    for rows, batch, block, lanes, window, drop in cases():
        alone = global_batches(orders(rows, batch, block, lanes, window, drop, 1))
        selection = rows if isinstance(rows, np.ndarray) else np.arange(rows)
        seen = np.sort(np.concatenate(alone))
        assert len(np.unique(seen)) == len(seen)
        if drop:
            assert len(seen) == len(selection) // batch * batch
            assert np.isin(seen, selection).all()
        else:
            assert np.array_equal(seen, selection)
        assert all(len(some) == batch for some in alone[: len(selection) // batch])
        for count in COUNTS[1:]:
            assert global_batches(orders(rows, batch, block, lanes, window, drop, count)) == alone
        assert global_batches(orders(rows, batch, block, lanes, window, drop, 1, epoch=1)) != alone


def test_windows_hold_what_they_deliver_and_blocks_are_read_once():
    for rows, batch, block, lanes, window, drop in cases(12):
        read = []
        for share, order in orders(rows, batch, block, lanes, window, drop, 2):
            delivered = []
            for number in range(order.windows):
                blocks = order.window_order(number)
                held = order.blocks.rows(blocks)
                assert len(held) == order.window_rows(number)
                assert held.tolist() == [row for each in blocks for row in _run(order.blocks, each)]
                read.append(held)
            for place in range(share.steps):
                start, stop = share.bounds(place, order.total)
                segments = order.segments(start, stop) if start < stop else []
                assert sum(each.stop - each.start for each in segments) == stop - start
                for each in segments:
                    delivered += [(each.window, at) for at in order.places(each)]
                if len(segments) == 1:
                    further = order.straight_to(segments[0])
                    assert order.segments(start, further) == [
                        type(segments[0])(segments[0].window, segments[0].start, segments[0].start + further - start)
                    ]
            assert len(set(delivered)) == len(delivered) == order.total
        if lanes % 2 == 0:
            together = np.concatenate(read)
            assert len(np.unique(together)) == len(together), "no row is read by two workers"


def test_what_is_remembered_of_an_order_is_within_what_the_budget_counts():
    (_, order), *_ = orders(200_000, 960, 64, 24, 60, False, 1)
    rows = max(order.window_rows(number) for number in range(order.windows))
    tracemalloc.start()
    try:
        for number in range(order.windows):
            order.places(Segment(number, 0, 1))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert order.windows >= 3
    assert kept <= 2 * 8 * rows + 100_000  # a plan counts 8 bytes a row of each of two windows


def _run(blocks, block):
    start, stop, picked = blocks.run(int(block))
    return np.arange(start, stop) if picked is None else start + picked


def test_in_file_order_each_batch_is_a_run_of_rows():
    for count in COUNTS:
        batches = global_batches(orders(203, 16, 10, 1, 2, False, count, seed=None))
        assert np.array_equal(np.concatenate(batches), np.arange(203))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("elastic") / "rows.h5"
    rows = 4099
    with h5py.File(path, "w") as file:
        values = np.repeat(np.arange(rows, dtype="f4")[:, None], 64, axis=1)
        file.create_dataset("x", data=values, chunks=(16, 64), compression="gzip")
        file["y"] = np.arange(rows)
    return str(path)


def workers(data, count, **settings):
    settings = {"batch_size": 96, "memory_budget": "640KiB", "elastic": True, **settings}
    return [H5ChunkSequence(data, **{"shard": (index, count), **settings}) for index in range(count)]


def read_together(sequences):
    """Return the targets of each batch of all workers, read batch by batch as training does."""
    readers = [sequence.next_epoch() for sequence in sequences]
    batches = []
    for parts in zip(*readers, strict=True):
        for x, y, *_ in parts:
            assert np.array_equal(x[:, 0], y.astype("f4"))
        batches.append(np.concatenate([part[1] for part in parts]).tolist())
    for sequence in sequences:
        sequence.close()
    return batches


@pytest.mark.parametrize("settings", [{}, {"memory_budget": None}, {"drop_remainder": True}, {"shuffle": False}])
def test_sequences_of_any_number_of_workers_train_on_the_same_batches(data, settings):
    alone = workers(data, 1, **settings)
    if not settings:
        assert alone[0].stream_plan.dealt.windows > 3
        assert alone[0].stream_plan.dealt.lanes > 3
    expected = read_together(alone)
    for count in COUNTS[1:]:
        assert read_together(workers(data, count, **settings)) == expected
    seen = np.concatenate(expected)
    assert len(np.unique(seen)) == len(seen) == (4099 // 96 * 96 if "drop_remainder" in settings else 4099)


def test_each_chunk_is_read_by_one_worker_where_their_number_divides_the_lanes(data):
    sequences = workers(data, 2)
    for sequence in sequences:
        assert len(list(sequence.next_epoch())) == len(sequence)
    alone = workers(data, 1)[0]
    assert len(list(alone.next_epoch())) == len(alone)
    read = sum(sequence.opened().reader.rows_read for sequence in sequences)
    assert alone.opened().reader.rows_read == 4099
    assert read == 4099
    for sequence in (*sequences, alone):
        sequence.close()


def test_a_stopped_run_goes_on_with_another_number_of_workers(data):
    whole = read_together(workers(data, 1))
    first = workers(data, 3)
    readers = [sequence.next_epoch() for sequence in first]
    seen = []
    for _ in range(17):
        seen.append(np.concatenate([next(reader)[1] for reader in readers]).tolist())
    states = [json.loads(json.dumps(sequence.state_dict())) for sequence in first]
    assert all(state == states[0] for state in states)
    for count in (1, 2, 8):
        rest = workers(data, count)
        for sequence in rest:
            sequence.load_state_dict(states[0])
        assert seen + read_together(rest) == whole


@pytest.mark.parametrize(("before", "after"), [((1, 2), None), (None, (2, 3)), ((0, 2), (2, 3))])
def test_resume_training_goes_on_with_another_number_of_workers(data, tmp_path, monkeypatch, before, after):
    import keras

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                raise KeyboardInterrupt

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(tuple(sequence.progress.upcoming))

    def fit(rank, *callbacks):
        for name, number in zip(("RANK", "WORLD_SIZE"), rank or (0, 1), strict=True):
            monkeypatch.setenv(name, str(number))
        (made,) = workers(data, 1, shard=rank or (0, 1), rows=(0, 1000))
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        resume = ResumeTraining(tmp_path / "run.resume", made, save_freq=5)
        return made, lambda: model.fit(made, verbose=0, callbacks=[resume, *callbacks])

    found = []
    _, run = fit(before, Stop())
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [path.name for path in tmp_path.iterdir()] == [
        "run.resume" if before is None else f"run.rank{before[0]}.resume"
    ]
    sequence, run = fit(after, Look())
    run()
    assert found == [(0, 5)], "the very next batch after the one that was saved"


def test_resume_training_says_that_workers_with_rows_of_their_own_cannot_be_more(data, tmp_path):
    import keras

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for shard in ((0, 2), (0, 3)):
        sequence = H5ChunkSequence(data, shard=shard, batch_size=400)
        resume = ResumeTraining(tmp_path / "run.resume", sequence, keep=True)
        if shard == (0, 2):
            model.fit(sequence, verbose=0, callbacks=[resume])
            continue
        with pytest.raises(UsageError, match=r"shard was \[0, 2\].*elastic=True"):
            model.fit(sequence, verbose=0, epochs=2, callbacks=[resume])


def test_another_number_of_workers_with_rows_of_their_own_is_told_what_to_do(data):
    state = H5ChunkSequence(data, shard=(0, 2)).state_dict()
    with pytest.raises(UsageError, match=r"shard was \[0, 2\].*elastic=True"):
        H5ChunkSequence(data, shard=(0, 3)).load_state_dict(state)


@pytest.mark.parametrize("elastic", [True, False])
def test_padded_ends_add_up_to_one_process(data, elastic):
    import keras

    def step(count):
        """Return the last step's loss, the mean over workers of what each one's batch comes to, and its rows."""
        size = 96 if elastic else 96 // count
        made = workers(data, count, pad_remainder=True, elastic=elastic, batch_size=size)
        last = [sequence.batch(len(sequence) - 1) for sequence in made]
        assert {len(x) for x, _, _ in last} == {96 // count}
        loss = keras.losses.MeanSquaredError()
        each = [float(loss(y[:, None].astype("f4"), 0.5 * x[:, :1], sample_weight=weight)) for x, y, weight in last]
        return np.mean(each), np.concatenate([y[weight > 0] for _, y, weight in last])

    alone, rows = step(1)
    together, several = step(4)
    assert len(rows) == len(several) == 4099 % 96
    assert together == pytest.approx(np.sum((0.5 * several.astype("f8")) ** 2) / 96, rel=1e-5)
    if elastic:
        assert np.array_equal(several, rows)
        assert together == pytest.approx(alone, rel=1e-5)


def test_a_worker_without_a_row_of_the_last_batch_gets_rows_of_weight_0(data):
    last = [sequence.batch(len(sequence) - 1) for sequence in workers(data, 8, rows=(0, 99), pad_remainder=True)]
    assert [int(weight.sum()) for _, _, weight in last] == [0, 0, 1, 0, 0, 1, 0, 1]
    assert all(len(x) == len(y) == len(weight) == 12 for x, y, weight in last)
    with pytest.raises(UsageError, match=r"too few for 8 workers.*pad_remainder"):
        workers(data, 8, rows=(0, 99))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 2}, "batch_size: .*all workers together"),
        ({"memory_budget": "130KiB"}, "memory_budget"),
        ({"pad_remainder": True, "drop_remainder": True}, "pad_remainder.*take one"),
        ({"pad_remainder": True, "y": None}, "pad_remainder.*weigh"),
        ({"elastic": 0}, "elastic"),
    ],
)
def test_settings_that_cannot_be_are_refused(data, settings, words):
    with pytest.raises(UsageError, match=words):
        workers(data, 4, **settings)
