"""Memory of windows and batches."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import signal
from collections import deque

import pytest

from kerasmem.hdf5.rows.arena import Arena


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_is_not_lost_while_memory_is_returned():
    """TensorFlow frees arrays within calls in C. A pending signal is handled in the next Python code."""
    arena = Arena([((4,), "<f4")], rows=2, keep=1)
    arrays = arena.take(2)
    raise_signal = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        deque(map(operator.methodcaller("__call__"), [raise_signal, arrays.clear]), maxlen=0)
    assert arena.idle and arena.nbytes
