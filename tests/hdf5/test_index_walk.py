"""The index of chunks that HDF5 keeps."""

import json

import h5py
import pytest

from kerasmem.hdf5.direct.chunks import walk_chunks

_CHUNKS = 40_000
_GROWTH = """
import json, sys
import h5py
from kerasmem.hdf5.direct.chunks import walk_chunks

def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) << 10

seen = 0
def note(info):
    global seen
    seen += 1

with h5py.File(sys.argv[1]) as file:
    dataset = file["x"]
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = resident("VmHWM")
    walk_chunks(dataset, note)
    print(json.dumps([seen, resident("VmHWM") - before]))
"""


def sparse(path, chunks):
    """Write a dataset of chunks that have their places and take no room on the disk."""
    with h5py.File(path, "w") as file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((256, 784))
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((256 * chunks, 784), (h5py.h5s.UNLIMITED, 784))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_FLOAT, space, creation)
    return path


def test_an_index_of_many_chunks_is_read_in_little_memory(tmp_path, program):
    path = sparse(tmp_path / "large.h5", _CHUNKS)
    done = program("-c", _GROWTH, path)
    assert done.code == 0, done.err
    seen, grown = json.loads(done.out)
    assert seen == _CHUNKS
    assert grown < 6 << 20, "HDF5's own setting takes 16 MB"


def test_the_cache_of_the_file_is_as_before(tmp_path):
    with h5py.File(sparse(tmp_path / "small.h5", 500)) as file:
        before = file.id.get_mdc_config().max_size

        def note(info):
            assert file.id.get_mdc_config().max_size < before
            walk_chunks(file["x"], lambda info: None)  # as another thread might
            if info.chunk_offset[0]:
                raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            walk_chunks(file["x"], note)
        assert file.id.get_mdc_config().max_size == before
