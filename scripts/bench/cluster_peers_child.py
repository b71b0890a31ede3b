"""One worker of one loader in a process of its own: goes through its part of an epoch each time it is told to.

Started by cluster_peers.py with one argument of JSON, its `Worker.spec`. It reads orders on standard input, a line of
JSON each, and answers likewise on its original standard output. Times are of `time.monotonic`, which all processes of
a machine share. Imports nothing of the bench, as it runs in other people's environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

DOWNLOADS = 16
WORKERS = 2  # of torch's DataLoader; with 4 it was no faster on two cores

Batches = Iterator[tuple[np.ndarray, np.ndarray]]
"""Features as float32, and labels, which are the numbers of the rows."""
Epoch = tuple[Batches, Callable[[], Any]]
"""The batches, and what returns the state to go on with."""


def kerasmem(spec: dict[str, Any], order: dict[str, Any]) -> Epoch:
    from kerasmem import H5ChunkSequence

    sequence = H5ChunkSequence(
        "s3://data/hdf5/train.index", batch_size=spec["batch"], shard=(spec["rank"], spec["ranks"]), elastic=True,
        storage_options={"endpoint_url": spec["endpoint"], "key": "any", "secret": "any"},
    )  # fmt: skip
    if order["state"] is not None:
        sequence.load_state_dict(order["state"])
    return sequence.next_epoch(), sequence.state_dict


def streaming(spec: dict[str, Any], order: dict[str, Any]) -> Epoch:
    from streaming import StreamingDataLoader, StreamingDataset

    each = spec["batch"] // spec["ranks"]
    data = StreamingDataset(
        remote="s3://data/mds", local=f"{order['local']}/mds", shuffle=True, batch_size=each, predownload=8 * each,
        shuffle_block_size=spec["window"],
    )  # fmt: skip
    for stream in data.streams:
        stream._downloader.clean_up()  # the loader's processes are forked, and would all read from its one connection
    loader = StreamingDataLoader(data, batch_size=each, num_workers=WORKERS, prefetch_factor=4)
    if order["state"] is not None:
        loader.load_state_dict(order["state"])
    batches = ((batch["x"].numpy().astype(np.float32), batch["y"].numpy()) for batch in loader)
    return batches, loader.state_dict


def grain(spec: dict[str, Any], order: dict[str, Any]) -> Epoch:
    import grain as library

    def parse(record: bytes) -> tuple[np.ndarray, np.int64]:
        return np.frombuffer(record, np.uint8, offset=8).reshape(spec["shape"]), np.frombuffer(record, "<i8", 1)[0]

    source = library.sources.ArrayRecordDataSource(fetched(spec, f"{order['local']}/array_record"))
    data = library.MapDataset.source(source).shuffle(seed=1).map(parse)
    rank = library.sharding.ShardOptions(shard_index=spec["rank"], shard_count=spec["ranks"])
    iterator = iter(library.experimental.ElasticIterator(data, spec["batch"], rank))
    if order["state"] is not None:
        iterator.set_state(order["state"])
    return ((x.astype(np.float32), y) for x, y in iterator), iterator.get_state


def fetched(spec: dict[str, Any], folder: str) -> list[str]:
    """Return the files, once the first worker has downloaded them for all workers of the machine."""
    paths = [f"{folder}/part-{number:05}.array_record" for number in range(spec["files"])]
    whole = f"{folder}/whole"
    if spec["rank"] == 0 and not os.path.exists(whole):
        os.makedirs(folder, exist_ok=True)
        import boto3
        from botocore.config import Config

        config = Config(max_pool_connections=DOWNLOADS)
        store = boto3.client("s3", endpoint_url=spec["endpoint"], config=config)

        def fetch(path: str) -> None:
            store.download_file("data", f"array_record/{os.path.basename(path)}", path)

        with ThreadPoolExecutor(DOWNLOADS) as pool:
            list(pool.map(fetch, [path for path in paths if not os.path.exists(path)]))
        open(whole, "w").close()
    while not os.path.exists(whole):
        time.sleep(0.005)
    return paths


LOADERS = {
    "kerasmem": (kerasmem, ("kerasmem", "s3fs"), ("keras", "s3fs")),
    "streaming": (streaming, ("streaming", "boto3"), ("mosaicml-streaming", "torch", "boto3")),
    "grain": (grain, ("grain", "boto3"), ("grain", "array_record", "boto3")),
}
"""What opens each, the modules that it is ready with, and the packages whose versions are told."""


def write_data(spec: dict[str, Any]) -> dict[str, int]:
    """Write the rows in each format, their labels being their numbers; return the bytes of each."""
    import h5py
    from array_record.python.array_record_module import ArrayRecordWriter
    from streaming import MDSWriter

    folder, shape, rows = Path(spec["folder"]), spec["shape"], spec["rows_of_file"]
    for name in ("hdf5", "mds", "array_record"):
        (folder / name).mkdir(parents=True)
    random = np.random.default_rng(0)
    columns = {"x": "ndarray:uint8:" + ",".join(map(str, shape)), "y": "int"}
    size = spec["batch"] * (int(np.prod(shape)) + 16) + 4096
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=size) as mds:
        for number in range(spec["files"]):
            x = random.integers(0, 256, (rows, *shape), "u1")
            y = np.arange(number * rows, (number + 1) * rows)
            with h5py.File(folder / "hdf5" / f"part-{number:05}.h5", "w") as file:
                file.create_dataset("x", data=x, chunks=(spec["chunk"], *shape))
                file["y"] = y
            packed = [label.tobytes() + row.tobytes() for row, label in zip(x, y, strict=True)]
            writer = ArrayRecordWriter(
                str(folder / "array_record" / f"part-{number:05}.array_record"), "group_size:1,uncompressed"
            )
            for row, label, record in zip(x, y, packed, strict=True):
                mds.write({"x": row, "y": int(label)})
                writer.write(record)
            writer.close()
    return {name: sum(each.stat().st_size for each in (folder / name).iterdir()) for name in os.listdir(folder)}


def go(epoch: Epoch, stop: int | None) -> dict[str, Any]:
    """Go through the batches, or through `stop` of them; return when they came, which rows, and the state then."""
    batches, state = epoch
    rows, times = [], []
    for x, y in batches:
        times.append(time.monotonic())
        assert x.dtype == np.float32 and len(x) == len(y)
        rows += np.asarray(y).tolist()
        if len(times) == stop:
            break
    return {"first": times[0], "last": times[-1], "rows": rows, "state": state() if stop else None}


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes elsewhere
    sys.path[0] = spec["root"]  # in place of the bench's folder, where a `streaming` lies too
    if "folder" in spec:
        print(json.dumps(write_data(spec)), file=answers, flush=True)
        return
    make, modules, packages = LOADERS[spec["loader"]]
    for module in modules:
        __import__(module)
    if spec["loader"] == "kerasmem":
        from kerasmem import H5ChunkSequence  # noqa: F401 - loads Keras, and TensorFlow with it
    elif spec["loader"] == "streaming":
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # what workers that were killed leave behind, as its manual has it
    print(json.dumps({"versions": {name: metadata.version(name) for name in packages}}), file=answers, flush=True)
    kept = []  # a generator that is collected would end its loader's processes while others wait for them
    for line in sys.stdin:
        order = json.loads(line)
        kept.append(make(spec, order))
        print(json.dumps(go(kept[-1], order["stop"])), file=answers, flush=True)
        if order["stop"] is None:
            kept.pop()


if __name__ == "__main__":
    main()
