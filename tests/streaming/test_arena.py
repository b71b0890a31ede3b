"""Memory that is used again once nobody holds it."""

from __future__ import annotations

import numpy as np

from kerasmem.hdf5.memory import Arena


def addresses(arrays):
    return [array.__array_interface__["data"][0] for array in arrays]


def arena(keep=2):
    return Arena([((3,), "float32"), ((), "int64")], rows=100, keep=keep)


def test_arrays_have_the_shapes_asked_for_and_are_aligned():
    x, y = arena().take(40)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((40, 3), np.float32, (40,), np.int64)
    assert all(place % 64 == 0 for place in addresses([x, y]))
    x[:], y[:] = 1, 2
    assert x.min() == 1, "the two do not overlap"


def test_memory_is_used_again_when_the_last_view_has_gone():
    memory = arena()
    x, y = memory.take(100)
    place, view = addresses([x])[0], x[10:20, 1:]
    del x, y
    assert addresses(memory.take(5))[0] != place, "a view of it is still held"
    del view
    assert addresses(memory.take(100))[0] == place


def test_more_than_is_kept_is_given_back():
    memory = arena(keep=1)
    held = [memory.take(1) for _ in range(5)]
    assert not memory.idle
    most = memory.nbytes
    held.clear()
    assert memory.nbytes == most // 5
    assert memory.idle
    memory.clear()
    assert memory.nbytes == 0


def test_others_that_hold_memory_count():
    memory = arena()
    x, y = memory.take(100)
    place, held = addresses([x])[0], memoryview(x)
    del x, y
    assert addresses(memory.take(1))[0] != place
    assert held.nbytes == 1200
