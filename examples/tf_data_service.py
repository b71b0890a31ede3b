"""Train from a file that several reader processes serve, by the tf.data service.

    python examples/tf_data_service.py [--workers 2] [--rows 40000] [--file FILE] [--kill]

Where one process cannot read, decode or preprocess as fast as training goes, others read for it. The script writes an
HDF5 file, starts a dispatcher and reader processes on this machine, and trains one epoch on what they send. On other
machines, with the file at the same path, a reader is started by the same line:

    python examples/tf_data_service.py --serve HOST:PORT --own HOST:PORT

Every row comes exactly once. Of a reader that dies the service promises that its rows come at most once: what it had
read and not yet sent is lost, and nothing is repeated. Training waits for a reader with the same address, however
long that takes, so something has to start it again; here a thread does. `--kill` kills a reader in the epoch's middle.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

FEATURES = 256
BATCH = 64


def main() -> int:
    """Write the file, start dispatcher and readers, train an epoch, count the rows."""
    arguments = read_arguments()
    if arguments.serve:
        return serve(arguments.serve, arguments.own)
    import keras
    import numpy as np
    import tensorflow as tf

    from kerasmem import H5ChunkSequence

    folder = Path(tempfile.mkdtemp(prefix="kerasmem-service-"))
    path = Path(arguments.file or folder / "served.h5")
    if not path.exists():
        write_file(path, arguments.rows)
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    readers = [Reader(address) for _ in range(arguments.workers)]
    try:
        columns = {"features": "features", "row": "row"}
        settings = {"batch_size": BATCH, "dtype": {"row": "stored"}, "memory_budget": "8MB"}
        with H5ChunkSequence(path, columns, "labels", **settings) as sequence:
            rows = sequence.num_rows
            data = sequence.as_service_dataset()
        dynamic = service.ShardingPolicy.DYNAMIC  # each piece of the file to one reader
        served = data.apply(service.distribute(dynamic, dispatcher.target)).rebatch(BATCH)

        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(10, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")
        times, killed, started = np.zeros(rows, int), False, time.perf_counter()
        for inputs, labels in served:
            model.train_on_batch(inputs["features"], labels)
            times[inputs["row"].numpy()] += 1
            if arguments.kill and not killed and times.sum() > rows // 3:
                readers[0].process.kill()
                killed = True
        seconds = time.perf_counter() - started
        print(f"{arguments.workers} readers, {rows:,} rows in {seconds:.1f} s")
        if killed:
            print("one was killed, and started again at its address")
        print(f"once {np.sum(times == 1):,}, never {np.sum(times == 0):,}, more than once {np.sum(times > 1):,}")
        return 0
    finally:
        for reader in readers:
            reader.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Reader:
    """A reader process on this machine, started again at the same address whenever it ends."""

    def __init__(self, dispatcher: str) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            own = f"localhost:{free.getsockname()[1]}"
        self._command = [sys.executable, __file__, "--serve", dispatcher, "--own", own]
        self._stopped = threading.Event()
        self.process = self._start()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def _start(self) -> subprocess.Popen:
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if "serving" not in process.stdout.readline():
            raise RuntimeError("a reader did not start")
        return process

    def _watch(self) -> None:
        while not self._stopped.wait(0.2):
            if self.process.poll() is not None:
                self.process = self._start()

    def stop(self) -> None:
        """End it for good."""
        self._stopped.set()
        self._watching.join()  # it may be starting another just now
        self.process.kill()
        self.process.wait()


def serve(dispatcher: str, own: str | None) -> int:
    """Be a reader: all it needs is TensorFlow, and the file at the path that the data set names."""
    import tensorflow as tf

    service = tf.data.experimental.service
    settings = {"heartbeat_interval_ms": 500, "dispatcher_timeout_ms": 60_000}
    if own:
        settings.update(worker_address=own, port=int(own.rsplit(":", 1)[1]))
    server = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher, **settings))
    print("serving", flush=True)
    server.join()
    return 0


def write_file(path: Path, rows: int) -> None:
    """Write rows in chunks, uncompressed: TensorFlow's own operations read them without HDF5."""
    import h5py
    import numpy as np

    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (rows, FEATURES), "f4", chunks=(256, FEATURES))
        for start in range(0, rows, 4096):
            stop = min(start + 4096, rows)
            features[start:stop] = random.standard_normal((stop - start, FEATURES), dtype="f4")
        file["labels"] = random.integers(0, 10, rows).astype("u1")
        file["row"] = np.arange(rows)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="reader processes (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the file (default: %(default)s)")
    parser.add_argument("--file", help="read this file, written by an earlier run, or write it there")
    parser.add_argument("--kill", action="store_true", help="kill a reader in the middle")
    parser.add_argument("--serve", metavar="HOST:PORT", help="be a reader, for the dispatcher there")
    parser.add_argument("--own", metavar="HOST:PORT", help="the reader's address, as the others reach it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
