"""Living Python objects, read while other threads run."""

from __future__ import annotations

import gc
import itertools
from typing import Any

_NO_TUPLES: dict[type, Any] = {tuple: ()}  # replaces a group of tuples


def living_objects() -> list[Any]:
    """Return the objects that the garbage collector tracks, except plain tuples and frozen objects.

    This is a single C call, so no other thread runs during it.
    """
    everything = itertools.chain.from_iterable(itertools.starmap(gc.get_objects, [()]))
    # The None at the end keeps groupby from referencing the last object.
    by_type = itertools.groupby(itertools.chain(everything, [None]), key=type)
    return list(itertools.chain.from_iterable(itertools.starmap(_NO_TUPLES.get, by_type)))
