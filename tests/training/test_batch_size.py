"""A batch size that fits, found by trial."""

from __future__ import annotations

import os
import signal

import pytest
import tensorflow as tf

import kerasmem
from kerasmem.errors import ModelError, UsageError

RAN_OUT = "OOM when allocating tensor with shape[512,12] and type float on /device:CPU:0 by allocator cpu"


def failing(most, tried, message=RAN_OUT):
    def train(batch_size, *, more=0):
        tried.append(batch_size)
        if batch_size > most:
            raise tf.errors.ResourceExhaustedError(None, None, message)
        return batch_size + more

    return train


def test_the_batch_is_halved_until_it_fits():
    tried = []
    train = kerasmem.find_executable_batch_size(failing(20, tried), starting_batch_size=100)
    with pytest.warns(RuntimeWarning, match="a batch of 100 ran out of memory .*; retrying with 50") as caught:
        assert train(more=3) == 15
    assert {warning.filename for warning in caught} == {__file__}
    assert tried == [100, 50, 25, 12] and train.__name__ == "train"
    with pytest.warns(RuntimeWarning), pytest.raises(ModelError, match="not even a batch of 1 fits: CPU:0 ran"):
        kerasmem.find_executable_batch_size(starting_batch_size=4)(failing(0, tried))()


def test_what_is_not_memory_comes_through_and_wrong_use_is_told():
    @kerasmem.find_executable_batch_size
    def train(batch_size):
        raise ValueError("a reason of its own")

    with pytest.raises(ValueError, match="a reason of its own"):
        train()
    with pytest.raises(UsageError, match="leave batch_size out"):
        train(4)
    with pytest.raises(UsageError, match="leave batch_size out"):
        train(batch_size=4)
    with pytest.raises(UsageError, match="must take the batch size"):
        kerasmem.find_executable_batch_size(lambda: 1)
    with pytest.raises(UsageError, match="starting_batch_size"):
        kerasmem.find_executable_batch_size(train, starting_batch_size=0)


def test_under_xla_nothing_is_tried_again_in_this_process():
    message = "RESOURCE_EXHAUSTED: XLA:GPU Out of memory while trying to allocate 104857600 bytes"
    assert kerasmem.explain_oom(tf.errors.ResourceExhaustedError(None, None, message)).family == "xla"
    tried = []
    with pytest.raises(ModelError, match=r"isolated=True"):
        kerasmem.find_executable_batch_size(failing(1, tried, message), starting_batch_size=8)()
    assert tried == [8]


def test_a_try_that_the_kernel_kills_halves_the_batch():
    @kerasmem.find_executable_batch_size(starting_batch_size=8, isolated=True)
    def train(batch_size):
        if batch_size > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch_size

    with pytest.warns(RuntimeWarning, match="a batch of 8 ran out of memory .*SIGKILL.*; retrying with 4"):
        assert train() == 4
