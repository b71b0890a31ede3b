#!/usr/bin/env python3
"""Shuffled batches from a store for 1 to 4 workers, against MosaicML Streaming and Grain's elastic iterator.

    python scripts/bench/cluster_peers.py [--rate 50] [--latency 20] [--repeats 2] [--quick]

Python needs mosaicml-streaming, grain, s3fs and boto3 beside kerasmem.

A server on loopback is asked as S3 is: it answers after some milliseconds, and sends no faster than the link, which
all workers share. Each loader has the same rows (64 × 64 × 3 bytes and a label) in its best format: HDF5 in chunks
and an index; MDS, a shard a batch; ArrayRecord, which Grain reads from files alone, so that one worker fetches them
for all of the machine, 16 at a time. All deliver float32 batches of 240 rows, shared by the workers, shuffled with an
order that allows another number of workers. MosaicML's workers are one node's, so that they share what was
downloaded; its shuffle block has as many rows as kerasmem's windows.

The first batch is the last worker's first one in a fresh process, from the order to begin on; imports are done
by then. In mid-epoch all workers are killed, started again, and given the state of the last batch: what they go on with
is timed in the same way, what lies on the disk stays there, and the rows before and after have to be those of an epoch,
each once. Then the same processes go through epochs, from nothing on the disk, timed to the last worker's last batch;
with it the CPU time of all workers and of what they started, which says more where the machine has other work.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from environment import ROOT, environment, write_results

SHAPE, CHUNK, BATCH = (64, 64, 3), 48, 240
WINDOW = (128 << 20) // (4 * 64 * 64 * 3)  # rows that kerasmem shuffles together with its usual budget
LOADERS = ("kerasmem", "streaming", "grain")
CHILD = Path(__file__).with_name("cluster_peers_child.py")
TIMES = ("first_seconds", "epoch_seconds", "cpu_seconds", "resumed_seconds")
EPOCHS = 2  # in processes that stay, after the one that was gone on with
_START, _LIMIT = 300.0, 300.0  # seconds


class Store:
    """The server, in a process of its own."""

    def __init__(self, folder: Path, rate: float, latency: float) -> None:
        link = Path(__file__).with_name("remote_link.py")
        self._process = subprocess.Popen(
            [sys.executable, str(link), str(folder), str(rate), str(latency)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{self._process.stdout.readline().strip()}"

    def stats(self) -> dict[str, int]:
        """Return requests and bytes since the last time."""
        with urllib.request.urlopen(f"{self.endpoint}/stats") as answer:
            return dict(json.load(answer))

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def write_index(folder: Path, endpoint: str, files: int) -> None:
    """Have the HDF5 files indexed where the workers will find them, so that it knows their ETags."""
    from kerasmem import index_data

    paths = [f"s3://data/hdf5/part-{number:05}.h5" for number in range(files)]
    index_data(paths, folder / "train.index", storage_options={"endpoint_url": endpoint, "key": "any", "secret": "any"})
    (folder / "train.index").rename(folder / "data" / "hdf5" / "train.index")


class Workers:
    """The processes of one loader.

    Args:
        spec: what all of them are told, as cluster_peers_child.py has it.
        ranks: how many.
    """

    def __init__(self, spec: dict[str, Any], ranks: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        begun = time.monotonic()
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(CHILD), json.dumps({**spec, "rank": rank, "ranks": ranks})], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
                env={
                    **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "S3_ENDPOINT_URL": spec["endpoint"], "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
                    "AWS_DEFAULT_REGION": "us-east-1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "",
                    "PYTHONWARNINGS": "ignore",
                },
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.versions = self._answers(_START)[0]["versions"]
        self.import_seconds = time.monotonic() - begun

    def go(self, local: str, stop: int | None = None, state: Any = None) -> dict[str, Any]:
        """Have all go through an epoch, or some batches; return seconds to the first and last batch, rows, state."""
        begun, cpu = time.monotonic(), self._cpu_seconds()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"local": local, "stop": stop, "state": state}).encode() + b"\n")
            process.stdin.flush()
        found = self._answers(_LIMIT)
        return {
            "first": max(each["first"] for each in found) - begun,
            "last": max(each["last"] for each in found) - begun,
            "rows": [row for each in found for row in each["rows"]],
            "state": found[0]["state"],
            "cpu": self._cpu_seconds() - cpu,
        }

    def kill(self) -> None:
        """End them and what they started, where they have not ended."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._errors.close()

    def _cpu_seconds(self) -> float:
        """Return the CPU time so far of them and of what they started."""
        sessions, ticks = {process.pid for process in self._processes}, 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15])) if int(fields[3]) in sessions else 0
        return ticks / os.sysconf("SC_CLK_TCK")

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        until, found = time.monotonic() + seconds, []
        for process in self._processes:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            line = process.stdout.readline() if ready else b""
            if not line:
                self._errors.seek(0)
                said = self._errors.read().decode(errors="replace").strip()[-2000:]
                self.kill()
                raise RuntimeError(f"no answer in {seconds:.0f} s: {said}")
            found.append(dict(json.loads(line)))
        return found


def measure(spec: dict[str, Any], store: Store, ranks: int, repeats: int) -> dict[str, Any]:
    """Measure one loader with so many workers.

    Raises:
        RuntimeError: it fails.
        AssertionError: its rows are not those of an epoch.
    """
    total, every = spec["files"] * spec["rows_of_file"], range(spec["files"] * spec["rows_of_file"])
    steps = total // BATCH
    row: dict[str, Any] = {name: [] for name in (*TIMES, "requests", "read")}
    for _ in range(repeats):
        with ExitStack() as ending:
            folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="kerasmem-"))
            workers = Workers(spec, ranks)
            ending.callback(workers.kill)
            before = workers.go(f"{folder}/killed", stop=steps // 2)
            workers.kill()
            workers = Workers(spec, ranks)
            ending.callback(workers.kill)
            after = workers.go(f"{folder}/killed", state=before["state"])
            both = before["rows"] + after["rows"]
            assert sorted(both) == list(every), f"{len(both)} rows in all, {len(set(both))} of the {total}"
            row["first_seconds"].append(round(before["first"], 3))
            row["resumed_seconds"].append(round(after["first"], 3))
            for number in range(EPOCHS):
                store.stats()
                done = workers.go(f"{folder}/{number}")
                stats = store.stats()
                assert sorted(done["rows"]) == list(every), f"{len(set(done['rows']))} of {total} rows"
                row["epoch_seconds"].append(round(done["last"], 3))
                row["cpu_seconds"].append(round(done["cpu"], 2))
                row["requests"].append(stats["requests"])
                row["read"].append(stats["sent"])
                shutil.rmtree(f"{folder}/{number}", ignore_errors=True)
    return {"versions": workers.versions, "import_seconds": round(workers.import_seconds, 1), **row}


def summary(row: dict[str, Any], rows: int, size: int) -> dict[str, Any]:
    """Return the medians of a row."""
    middle = {name: statistics.median(row[name]) for name in TIMES}
    return {
        "loader": row["loader"], "ranks": row["ranks"], **middle,
        "rows_per_second": round(rows / middle["epoch_seconds"], 1),
        "requests": statistics.median(row["requests"]),
        "read_over_rows": round(statistics.median(row["read"]) / size, 4),
    }  # fmt: skip


def goals(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each number of workers how kerasmem stands against the best of the others."""
    by_ranks: dict[int, list[dict[str, Any]]] = {}
    for row in found:
        by_ranks.setdefault(row["ranks"], []).append(row)
    said = []
    for ranks, rows in by_ranks.items():
        ours = next((row for row in rows if row["loader"] == "kerasmem"), None)
        others = [row for row in rows if row is not ours]
        if ours is None or not others:
            continue
        first, cpu = (min(row[name] for row in others) for name in ("first_seconds", "cpu_seconds"))
        rate = max(row["rows_per_second"] for row in others)
        said.append(
            {
                "ranks": ranks,
                "first_batch_over_best": round(ours["first_seconds"] / first, 3),
                "rate_over_best": round(ours["rows_per_second"] / rate, 3),
                "cpu_over_best": round(ours["cpu_seconds"] / cpu, 3),
                "read_over_rows": ours["read_over_rows"],
                "resumed_seconds": ours["resumed_seconds"],
            }
        )
    return said


def write(rows: list[dict[str, Any]], found: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Write what was measured so far."""
    settings |= {"row_shape": SHAPE, "chunk_rows": CHUNK, "batch_rows": BATCH, "window_rows": WINDOW}
    data = {
        "format_version": 1,
        "environment": environment("h5py", "numpy"),
        "settings": {**settings, "load_average": [round(each, 1) for each in os.getloadavg()]},
        "goals": goals(found),
        "summary": found,
        "rows": rows,
    }
    write_results("cluster_peers", data)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s")
    parser.add_argument("--latency", type=float, default=20.0, help="milliseconds a request")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--loaders", nargs="+", default=LOADERS)
    parser.add_argument("--quick", action="store_true", help="fewer rows and workers, one repeat, nothing written")
    options = parser.parse_args()
    files = 17
    if options.quick:
        options.ranks, options.repeats, files = [2], 1, 4
    spec: dict[str, Any] = {
        "files": files, "rows_of_file": 2 * BATCH, "shape": SHAPE, "batch": BATCH, "chunk": CHUNK, "window": WINDOW,
        "root": str(ROOT),
    }  # fmt: skip
    rows, found = [], []
    with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        written = [sys.executable, str(CHILD), json.dumps({**spec, "folder": f"{folder}/data"})]
        sizes = json.loads(subprocess.run(written, stdout=subprocess.PIPE, check=True).stdout)
        total = files * spec["rows_of_file"]
        store = Store(Path(folder), options.rate * 1e6, options.latency / 1000)
        try:
            write_index(Path(folder), store.endpoint, files)
            for ranks in options.ranks:
                for loader in options.loaders:
                    told = {**spec, "loader": loader, "endpoint": store.endpoint}
                    try:
                        row = measure(told, store, ranks, options.repeats)
                    except (RuntimeError, AssertionError) as error:
                        print(f"{loader}, {ranks} workers: {error}", file=sys.stderr)
                        rows.append({"loader": loader, "ranks": ranks, "failed": str(error)[-300:]})
                        continue
                    rows.append({"loader": loader, "ranks": ranks, **row})
                    found.append(summary(rows[-1], total, total * (64 * 64 * 3 + 8)))
                    print(json.dumps(found[-1]), file=sys.stderr)
                if not options.quick:
                    write(rows, found, {"rows": total, "bytes": sizes, "link_bytes_per_second": options.rate * 1e6,
                                        "latency_seconds": options.latency / 1000})  # fmt: skip
        finally:
            store.end()
    print(json.dumps(goals(found), indent=1))


if __name__ == "__main__":
    main()
