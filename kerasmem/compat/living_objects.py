"""All objects that Python's garbage collector knows, without harm to other threads.

A thread that is building a tuple gets a SystemError from Python where something else refers to that tuple, as the list
of `gc.get_objects` does while another thread has it.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from typing import Any

_NO_TUPLES: dict[type, Any] = {tuple: ()}  # in place of the tuples


def living_types() -> Counter[type]:
    """Return how many objects of each class the garbage collector knows."""
    return Counter(map(type, itertools.chain.from_iterable(itertools.starmap(gc.get_objects, [()]))))


def living_objects() -> list[Any]:
    """Return the objects that the garbage collector tracks, except plain tuples and frozen ones.

    All of it is one call without a line of Python, within which no other thread runs.
    """
    everything = itertools.chain.from_iterable(itertools.starmap(gc.get_objects, [()]))
    # What groups remembers the object that it has seen last.
    by_type = itertools.groupby(itertools.chain(everything, [None]), key=type)
    return list(itertools.chain.from_iterable(itertools.starmap(_NO_TUPLES.get, by_type)))
