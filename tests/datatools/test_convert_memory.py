"""Conversions of any size stay within their memory, in a process with a memory limit."""

from __future__ import annotations

import json
import os
import resource

import h5py
import numpy as np
import pytest

MIB = 1 << 20
WAYS = {
    "fortran": ("f.npy", {}),
    "npz": ("x.npz", {"shuffle": True}),
    "csv": ("x.csv", {"columns": {"x": "*"}}),
    "hdf5": ("x.h5", {"compression": "gzip:1", "split": "0.5,0.5"}),
}

# What threads have of their own differs by the machine: a stack and a heap each, and as many as there are processors.
SAME_EVERYWHERE = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "2"}

CODE = """
import json, resource, sys
import h5py, numpy as np
import kerasmem
import kerasmem.datatools.conversion
def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
allowed, folder, ways = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
import pyarrow.csv, pyarrow.compute, imagecodecs
before = status("VmData")
resource.setrlimit(resource.RLIMIT_DATA, (before + allowed, before + allowed))
try:
    np.ones(2 * allowed, "u1")
    print("not limited")
except MemoryError:
    pass
for name, (source, settings) in ways.items():
    settings = {"memory_budget": "32MiB", "force": True, **settings}
    done = kerasmem.data.convert(f"{folder}/{source}", f"{folder}/out.h5", **settings)
    rows = done.rows
    if len(done.outputs) > 1:  # several HDF5 files are read within the memory too
        done = kerasmem.data.convert(list(done.outputs), f"{folder}/back.h5", memory_budget="32MiB", force=True)
    with h5py.File(done.outputs[0]) as file:
        key = next(iter(file))
        total = sum(float(file[key][k : k + 10000, 0].astype("f8").sum()) for k in range(0, rows, 10000))
    print(json.dumps([name, rows, done.rows, total]), flush=True)
"""


def _same_everywhere():
    resource.setrlimit(resource.RLIMIT_STACK, (MIB, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def test_memory_is_bounded(program, tmp_path):
    pytest.importorskip("pyarrow")
    rows = 130_000  # 260 MB
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "<f8", (rows, 250))
    for first in range(0, rows, 10_000):
        x[first : first + 10_000] = np.arange(first, first + 10_000)[:, None] % 1000
    np.save(tmp_path / "f.npy", np.asfortranarray(x[:, :120]))
    np.savez(tmp_path / "x.npz", x=x)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(1000, 250), compression="gzip", compression_opts=1)
    line = ",".join(["{0}"] * 60)
    with open(tmp_path / "x.csv", "w") as file:
        file.write(",".join(f"c{k}" for k in range(60)) + "\n")
        file.writelines(line.format(k % 1000) + "\n" for k in range(rows))
    allowed = 220 * MIB  # 32 for the work, and what threads, pyarrow's blocks and HDF5 have of their own
    arguments = ("-c", CODE, allowed, tmp_path, json.dumps(WAYS))
    done = program(*arguments, env=SAME_EVERYWHERE, preexec_fn=_same_everywhere)
    assert done.code == 0, done.err[-2000:]
    result = [json.loads(line) for line in done.out.splitlines()]
    assert [entry[0] for entry in result] == list(WAYS)
    for entry in result:
        assert entry[1:] == [rows, rows, float((np.arange(rows) % 1000).sum())], entry
