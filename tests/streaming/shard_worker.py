"""Run by the sharding tests, once a worker: read two epochs of a shard and say which rows came and what was read.

shard_worker.py JOBS, a JSON list of (file, settings)
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def main(jobs: str) -> None:
    from kerasmem import H5ChunkSequence

    results = []
    for file, settings in json.loads(jobs):
        stream = H5ChunkSequence(file, **settings)
        epochs = [[batch[1].tolist() for batch in stream.next_epoch()]]
        read = stream.opened().reader.bytes_read
        epochs.append([batch[1].tolist() for batch in stream.next_epoch()])
        results.append({"shard": stream.shard, "steps": len(stream), "epochs": epochs, "bytes_read": read})
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
