"""Files that are written and read at given places, and cut back to where a checkpoint left them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def open_log(folder: str, name: str, size: int) -> int:
    """Return the descriptor of a file that grows: made if need be, and cut back to a size in bytes."""
    file = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.truncate(file, size)
    return file


def write_at(file: int, data: Any, at: int) -> int:
    """Write the bytes of an array or buffer, all of them, to a place in a file; return how many they are."""
    view = np.frombuffer(data, np.uint8).data
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], at + done)
    return done


def read_into(file: int, view: memoryview, at: int) -> None:
    """Fill a view from a place in a file.

    Raises:
        OSError: the file ends before that.
    """
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], at + done)
        if not got:
            raise OSError("a file of the conversion was cut off")
        done += got
