"""Memory of windows and batches."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import signal
from collections import deque

import numpy as np
import pytest

from kerasmem.hdf5.rows.arena import Arena


def test_memory_is_reused_once_the_last_view_is_gone():
    arena = Arena([((3,), "<f4"), ((), "<i8")], rows=10, keep=2)
    first, second = arena.take(10), arena.take(5)
    addresses = {arrays[0].ctypes.data for arrays in (first, second)}
    view = first[0][2:4]
    del first, second
    third = arena.take(10)
    assert third[0].ctypes.data in addresses and not np.shares_memory(third[0], view)
    size = arena.nbytes
    fourth = arena.take(10)
    assert arena.nbytes == size * 3 // 2
    del view, fourth
    assert arena.nbytes == size and arena.idle
    arena.clear()
    assert arena.nbytes == size // 2
    third[0][:] = 7
    del third
    assert arena.nbytes == 0


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_is_not_lost_while_memory_is_returned():
    """TensorFlow frees arrays within calls in C. A pending signal is handled in the next Python code."""
    arena = Arena([((4,), "<f4")], rows=2, keep=1)
    arrays = arena.take(2)
    raise_signal = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        deque(map(operator.methodcaller("__call__"), [raise_signal, arrays.clear]), maxlen=0)
    assert arena.idle and arena.nbytes
