"""The index of chunks that HDF5 keeps of a dataset, gone through once in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h5py

_CACHE_BYTES = 256 << 10


def walk_chunks(dataset: h5py.Dataset, note: Callable[[Any], None]) -> None:
    """Call `note` with what h5py tells of each stored chunk: `chunk_offset`, `filter_mask`, `byte_offset`, `size`.

    Args:
        dataset: a chunked dataset of an open file.
        note: called once a chunk, in the order of the index; what it raises goes through.
    """
    if hasattr(dataset.id, "chunk_iter"):
        with _small_cache(h5py.h5i.get_file_id(dataset.id)):
            dataset.id.chunk_iter(note)
    else:  # h5py over an HDF5 before 1.14
        for number in range(dataset.id.get_num_chunks()):
            note(dataset.id.get_chunk_info(number))


@contextmanager
def _small_cache(file: h5py.h5f.FileID) -> Iterator[None]:
    """Hold HDF5's cache of metadata small meanwhile.

    It counts a node of the index by its bytes in the file, and unpacked a node takes some ten times those: its own
    two MiB to begin with are 17 MB of memory for an index that is gone through once and then not needed.
    """
    before, config = file.get_mdc_config(), file.get_mdc_config()
    if before.max_size == _CACHE_BYTES:  # another thread's doing, which will set it back
        yield
        return
    config.set_initial_size = True
    config.initial_size = config.max_size = _CACHE_BYTES
    config.min_size = min(config.min_size, _CACHE_BYTES)
    config.incr_mode = config.decr_mode = config.flash_incr_mode = 0
    file.set_mdc_config(config)
    try:
        yield
    finally:
        file.set_mdc_config(before)
