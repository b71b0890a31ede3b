"""What Keras does with a `PyDataset`, as far as kerasmem rests on it: each line here is one behaviour of Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from kerasmem.compat.keras_reading import attach_reader, find_call


class Reader:
    """Notes what the adapter asks for."""

    workers, use_multiprocessing, max_queue_size, num_batches = 1, False, 10, 3

    def __init__(self, call):
        self.call, self.asked = call, []
        if call.steps:
            self.num_batches = None

    def __getitem__(self, index):
        self.asked.append("look")
        return np.ones((2, 1)), np.ones((2, 1))

    def batches(self):
        while True:
            for number in range(3):
                yield np.full((2, 1), number), np.ones((2, 1))
            if self.num_batches:
                return

    def on_epoch_begin(self):
        self.asked.append("begin")

    def on_epoch_end(self):
        self.asked.append("end")

    def for_tensorflow(self, data, look):
        self.asked.append("data set")
        return data


class Data(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.readers = []

    @property
    def workers(self):
        attach_reader(self, self.attached)
        return 1

    def attached(self, call):
        self.readers.append(Reader(call))
        return self.readers[-1]

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise AssertionError("Keras reads through the reader")


class Noted(keras.Model):
    """Notes the first feature of each batch."""

    def __init__(self):
        super().__init__()
        self.seen, self.calls = [], []
        self.compile(run_eagerly=True)

    def call(self, x):
        return x

    def train_step(self, data):
        self.seen.append(int(data[0][0, 0]))
        self.calls.append(find_call())
        return {"loss": 0.0}

    def test_step(self, data):
        return {"loss": 0.0}


def asked(data):
    return [each for each in data.readers[0].asked if each != "look"]


def test_each_call_makes_an_adapter_and_fit_one_more_for_validation():
    data, model = Data(), Noted()
    model.fit(data, validation_data=data, epochs=2, verbose=0)
    model.evaluate(data, verbose=0)
    model.predict(data, verbose=0)
    assert [reader.call.name for reader in data.readers] == ["fit", "validate", "evaluate", "predict"]
    assert {reader.call.model for reader in data.readers} == {model}
    assert model.calls[0].model is model


@pytest.mark.parametrize(("at_once", "steps"), [(1, 5), (2, 6)])
def test_steps_per_epoch_are_told_before_num_batches_is_asked(at_once, steps):
    data, model = Data(), Noted()
    model.compile(run_eagerly=True, steps_per_execution=at_once)
    model.fit(data, epochs=2, steps_per_epoch=5, verbose=0)
    assert data.readers[0].call.steps == steps
    assert model.seen == [k % 3 for k in range(2 * steps)], "one iterator for all epochs"


def test_fit_and_evaluate_end_an_epoch_once_before_the_first():
    for run in (Noted.fit, Noted.evaluate):
        data = Data()
        run(Noted(), data, verbose=0)
        assert asked(data) == ["data set", "end", "begin", "end"]


def test_validation_ends_an_epoch_before_each_of_its_epochs():
    data = Data()
    Noted().fit(np.ones((4, 1)), np.ones((4, 1)), validation_data=data, epochs=2, verbose=0)
    assert asked(data) == ["data set", *["end", "begin", "end"] * 2]


def test_where_nothing_reads_there_is_no_reader():
    data = Data()
    assert data.workers == 1
    assert data.readers == []
    assert find_call().name == ""
