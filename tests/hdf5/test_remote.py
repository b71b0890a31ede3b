"""H5ChunkSequence over HTTP and S3: equal batches, few requests, faults, changes, the cache."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
from remote_servers import FileServer, S3Server
from waiting import until

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, MissingExtraError, UsageError
from kerasmem.hdf5.rows import scan
from kerasmem.hdf5.rows.paths import Access

os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks by gRPC, which the emulator has not
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
pytestmark = pytest.mark.usefixtures("loaded_python")
CHILD = str(Path(__file__).with_name("remote_child.py"))
ROWS, BUDGET = 3000, "2MiB"
KINDS = {
    "gzip": {"chunks": (64, 16, 8), "compression": "gzip", "shuffle": True},
    "chunked": {"chunks": (64, 16, 8)},
    "contiguous": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    values = np.random.default_rng(0).normal(size=(ROWS, 16, 8)).astype("f4")
    for kind, options in KINDS.items():
        with h5py.File(folder / f"{kind}.h5", "w") as file:
            file.create_dataset("x", data=values, **options)
            file["y"] = np.arange(ROWS)
    for part in range(12):
        with h5py.File(folder / f"part-{part}.h5", "w") as file:
            file.create_dataset("x", data=values[part * 100 : part * 100 + 90 + part], chunks=(20, 16, 8))
            file["y"] = np.arange(90 + part) + part * 100
    return folder


@pytest.fixture
def web(folder):
    server = FileServer({path.name: path.read_bytes() for path in folder.iterdir()})
    yield server
    server.close()


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("moto")
    pytest.importorskip("flask_cors")
    pytest.importorskip("s3fs")
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("kerasmem.hdf5.io.objects._FIRST_WAIT", 0.01)


def equal(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        for array, wanted in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(array, wanted)


def epochs(path, count=1, **settings):
    with H5ChunkSequence(path, **{"batch_size": 50, "memory_budget": BUDGET, **settings}) as sequence:
        return [batch for _ in range(count) for batch in sequence.next_epoch()]


@pytest.fixture
def new_threads():
    """Returns the names of kerasmem's threads started since and still running."""
    before = set(threading.enumerate())
    return lambda: [each.name for each in set(threading.enumerate()) - before if each.name.startswith("kerasmem-")]


class TestSameBatches:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("settings", [{}, {"shuffle": False}], ids=["shuffled", "in order"])
    def test_http_reads_each_byte_once_per_epoch(self, web, folder, kind, settings, new_threads):
        path = folder / f"{kind}.h5"
        settings = {"batch_size": 50, "memory_budget": "1MiB", **settings}
        with H5ChunkSequence(path, **settings) as local, H5ChunkSequence(web.url(path.name), **settings) as remote:
            for epoch in (1, 2):
                equal(list(remote.next_epoch()), list(local.next_epoch()))
                assert remote.read_bytes <= 1.05 * epoch * len(web.files[path.name])
            blocks = remote.stream_plan.blocks.count
            assert (
                remote.stream_plan.memory == local.stream_plan.memory
                and remote.stream_plan.memory.window_blocks < blocks
            )
            assert len(web.requests) <= 2 * blocks + 8  # labels and metadata come on top
        assert web.sent <= 1.05 * 2 * len(web.files[path.name])
        assert not new_threads()

    def test_a_dropped_sequence_leaves_nothing_open(self, web, new_threads, capfd):
        batches = H5ChunkSequence(web.url("gzip.h5"), memory_budget=BUDGET).next_epoch()
        next(batches)
        del batches
        until(lambda: gc.collect() >= 0 and not new_threads())  # readers may hold the sequence at first
        assert "Unclosed" not in capfd.readouterr().err

    @pytest.mark.optional
    def test_over_s3(self, s3, folder):
        s3.ranges.clear()
        s3.put("bucket", "dir/train.h5", (folder / "gzip.h5").read_bytes())
        equal(
            epochs("s3://bucket/dir/train.h5", 2, remote={"storage_options": s3.options}), epochs(folder / "gzip.h5", 2)
        )
        assert sum(stop - first for first, stop in s3.ranges) <= 1.1 * 2 * (folder / "gzip.h5").stat().st_size
        for part in range(3):
            s3.put("bucket", f"parts/part-{part}.h5", (folder / f"part-{part}.h5").read_bytes())
        local = [folder / f"part-{part}.h5" for part in range(3)]
        equal(epochs("s3://bucket/parts/part-*.h5", remote={"storage_options": s3.options}), epochs(local))

    @pytest.mark.optional
    @pytest.mark.parametrize("refused", ["never", "at once", "later"])
    def test_s3_is_read_through_signed_links_unless_it_refuses_them(self, s3, folder, refused):
        s3.put("bucket", "train.h5", (folder / "gzip.h5").read_bytes())
        s3.links.clear()
        s3.refuses_links = refused == "at once"
        remote = {"storage_options": s3.options}
        with H5ChunkSequence("s3://bucket/train.h5", batch_size=50, memory_budget=BUDGET, remote=remote) as train:
            s3.refuses_links = refused != "never"
            equal(list(train.next_epoch()), epochs(folder / "gzip.h5"))
        s3.refuses_links = False
        assert all(s3.links) == (refused == "never") and any(s3.links)

    @pytest.mark.optional
    def test_over_gs(self, folder):
        pytest.importorskip("gcsfs")
        pytest.importorskip("gcp_storage_emulator")
        from gcp_storage_emulator.server import create_server

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
        server.start()
        try:
            options = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"}
            path = folder / "gzip.h5"
            fsspec.filesystem("gs", **options, project="test").pipe("bucket/dir/train.h5", path.read_bytes())
            with H5ChunkSequence(
                "gs://bucket/dir/tr*.h5", batch_size=50, memory_budget=BUDGET, remote={"storage_options": options}
            ) as remote:
                equal(list(remote.next_epoch()), epochs(path))
                assert remote.read_bytes <= 1.05 * path.stat().st_size
        finally:
            server.stop()

    @pytest.mark.parametrize(
        "settings",
        [
            {"rows": np.arange(0, ROWS, 7)},
            {"dtype": "float64", "scale": (2.0, 1.0)},
            {"transform": lambda x, y: (x * 2, y), "workers": 3},
            {"memory_budget": None},
        ],
        ids=lambda settings: "-".join(settings),
    )
    def test_other_settings(self, web, folder, settings):
        equal(epochs(web.url("gzip.h5"), **settings), epochs(folder / "gzip.h5", **settings))

    def test_lists_patterns_and_local_files(self, web, folder):
        local = [folder / f"part-{part}.h5" for part in range(12)]
        wanted = epochs(local)
        equal(epochs([web.url(path.name) for path in local]), wanted)
        equal(epochs(web.url("part-*.h5")), wanted)  # part-2 before part-10
        mixed = [web.url(path.name) if at % 2 else path for at, path in enumerate(local)]
        equal(epochs(mixed), wanted)
        with pytest.raises(DataError, match="no file matches"):
            epochs(web.url("none-*.h5"))

    def test_first_bytes_are_requested_in_groups(self, web, monkeypatch):
        asked, ask = [], scan.request_infos
        monkeypatch.setattr(scan, "GROUP", 5)
        monkeypatch.setattr(scan, "request_infos", lambda urls, access: asked.append(len(urls)) or ask(urls, access))
        scan.scan_files([web.url(f"part-{part}.h5") for part in range(12)], ["x"], Access())
        assert asked == [5, 5, 2]

    def test_storage_options_are_pickled_and_never_shown(self, web, folder):
        web.needs = "Bearer SECRET"
        options = {"headers": {"Authorization": "Bearer SECRET"}}
        with H5ChunkSequence(web.url("gzip.h5"), memory_budget=BUDGET, remote={"storage_options": options}) as train:
            assert "SECRET" not in repr(train) + train.describe() + repr(train._access)
            copy = pickle.loads(pickle.dumps(train))
            with copy:
                equal(list(copy), list(train))
        with pytest.raises(DataError, match="no permission to read it"):
            epochs(web.url("gzip.h5"))

    def test_other_fsspec_file_system(self, folder):
        memory = fsspec.filesystem("memory")
        memory.pipe("/here/gzip.h5", (folder / "gzip.h5").read_bytes())
        equal(epochs("memory://here/gzip.h5"), epochs(folder / "gzip.h5"))
        equal(epochs("memory://here/*.h5"), epochs(folder / "gzip.h5"))


class TestFaults:
    def test_transient_failures_are_retried(self, web, folder, impatient):
        wanted = epochs(folder / "gzip.h5")
        tries = Counter()

        def fault(method, name, first, last):
            """Fail each range up to three times, drawn from its offsets regardless of the order of requests."""
            tries[first, last] += 1
            chance = random.Random(f"{first} {last}")
            if tries[first, last] > chance.randrange(4):
                return None
            return chance.choice([("status", 503), ("cut", (last - first) // 3)])

        web.fault, web.rate = fault, 4e6
        with H5ChunkSequence(web.url("gzip.h5"), batch_size=50, memory_budget=BUDGET) as remote:
            equal(list(remote.next_epoch()), wanted)
        assert sum(status == 503 for *_, status in web.log) > 2 and max(tries.values()) >= 4

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            (("status", 404), "the object does not exist"),
            (("status", 403), "no permission to read it.* storage_options"),
            (("whole",), "sends whole files only .* download it first"),
            (("status", 500), "failed 7 times in a row, most recently with: HTTP status 500"),
            (("cut", 0), "failed 7 times in a row"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
    def test_permanent_failures_are_named_without_secrets(self, web, impatient, fault, message, later, new_threads):
        url = web.url("gzip.h5", user="me:SECRET@") + "?X-Amz-Signature=SECRET"
        if not later:
            web.fault = lambda *request: fault
        with pytest.raises(DataError, match=message) as caught, H5ChunkSequence(url, memory_budget=BUDGET) as train:
            assert "SECRET" not in repr(train) + train.describe()
            web.fault = lambda *request: fault
            list(train)
        shown = "".join(traceback.format_exception(caught.value))
        assert "SECRET" not in shown.replace(f"{url!r}", "") and "gzip.h5?…" in str(caught.value)
        assert not new_threads()

    def test_redirects(self, web, folder):
        web.redirects = {"moved.h5": "/gzip.h5", "evil.h5": "file:///etc/passwd", "loop.h5": "/loop.h5"}
        equal(epochs(web.url("moved.h5")), epochs(folder / "gzip.h5"))
        with pytest.raises(DataError, match=r"cannot be read: .*Redirect"):
            epochs(web.url("evil.h5"))
        with pytest.raises(DataError, match="cannot be read"):
            epochs(web.url("loop.h5"))

    @pytest.mark.optional
    def test_s3_refusals(self, s3, impatient):
        s3.put("bucket", "exists.h5", b"no HDF5")
        for url, message in (
            ("s3://bucket/none.h5", "the object does not exist"),
            ("s3://bucket/exists.h5", "this is not an HDF5 file"),
            ("s3://no-such-bucket/none.h5", "the object does not exist"),
            ("s3://bucket", "this is a folder, not a file"),
        ):
            with pytest.raises(DataError, match=message):
                epochs(url, remote={"storage_options": s3.options})

    def test_what_is_no_hdf5_file(self, web):
        cut = web.files["contiguous.h5"][:100_000]
        for data, message in ((b"", "is empty"), (b"text" * 99, "not an HDF5 file"), (cut, "is truncated")):
            web.put("bad.h5", data)
            with pytest.raises(DataError, match=message):
                epochs(web.url("bad.h5"))

    def test_wrong_settings(self, web, impatient):
        with pytest.raises(UsageError, match=r"'foo://bucket/a.h5' cannot be opened .*: Protocol not known: foo"):
            epochs("foo://bucket/a.h5")
        with pytest.raises(DataError, match=r"there is no host of this name|failed 7 times"):
            epochs("http://no-such-host.invalid/a.h5")

    def test_a_missing_package_is_named(self, web, monkeypatch):
        monkeypatch.setitem(sys.modules, "s3fs", None)
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
        with pytest.raises(MissingExtraError, match=r"kerasmem\[s3\]"):
            epochs("s3://bucket/a.h5")

    def test_links_of_remote_files_are_never_followed(self, web, tmp_path):
        with h5py.File(tmp_path / "links.h5", "w") as file:
            file["x"] = h5py.ExternalLink(web.url("gzip.h5"), "x")
            file["y"] = np.arange(ROWS)
        with pytest.raises(DataError, match="leads through an external link"):
            epochs(tmp_path / "links.h5")
        web.put("links.h5", (tmp_path / "links.h5").read_bytes())
        for trusted in (False, True):
            with pytest.raises(DataError, match="leads through an external link"):
                epochs(web.url("links.h5"), trust_file=trusted)
        assert all(name == "links.h5" for _, name, *_ in web.log)


class TestChanges:
    """A replaced object is an error that names it, and no batch mixes the two."""

    def spoil(self, data):
        return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]

    def check(self, url, change, **settings):
        with H5ChunkSequence(url, batch_size=50, memory_budget=BUDGET, **settings) as train:
            whole = train.next_epoch()
            next(whole)
            change()
            with pytest.raises(DataError, match=r"gzip.h5'.* replaced or rewritten while in use .* again"):
                list(whole)
            with pytest.raises(DataError, match="replaced or rewritten"):
                list(train)

    @pytest.mark.parametrize("tagged", [True, False], ids=["ETag", "Last-Modified"])
    def test_over_http(self, web, tagged):
        web.etag = tagged
        data = web.files["gzip.h5"]
        self.check(web.url("gzip.h5"), lambda: web.put("gzip.h5", self.spoil(data)))
        with H5ChunkSequence(web.url("gzip.h5"), memory_budget=BUDGET) as train:
            web.put("gzip.h5", data, 1.6e9)
            with pytest.raises(DataError, match="replaced or rewritten"):  # since it was made
                list(train)

    @pytest.mark.optional
    def test_over_s3(self, s3, folder):
        data = (folder / "gzip.h5").read_bytes()
        s3.put("bucket", "gzip.h5", data)
        change = lambda: s3.put("bucket", "gzip.h5", self.spoil(data))  # noqa: E731
        self.check("s3://bucket/gzip.h5", change, remote={"storage_options": s3.options})

    def test_file_system_without_versions_in_answers(self, folder):
        memory = fsspec.filesystem("memory")
        data = (folder / "gzip.h5").read_bytes()
        memory.pipe("/gzip.h5", data)
        self.check("memory:///gzip.h5", lambda: (memory.rm("/gzip.h5"), memory.pipe("/gzip.h5", self.spoil(data))))

    def test_missing_version_warns(self, web, folder):
        web.etag = web.modified = False
        with pytest.warns(UserWarning, match="its store reports no version"):
            equal(epochs(web.url("gzip.h5")), epochs(folder / "gzip.h5"))


class TestCacheInUse:
    def test_second_epoch_is_read_from_the_cache(self, web, tmp_path, folder):
        settings = {"remote": {"cache": tmp_path / "cache", "cache_size": "64MiB"}}
        wanted = epochs(folder / "gzip.h5", 2)
        equal(epochs(web.url("gzip.h5"), 2, **settings), wanted)
        assert web.sent <= 1.1 * len(web.files["gzip.h5"])
        before = web.sent
        equal(epochs(web.url("gzip.h5", user="u:p@"), 2, **settings), wanted)
        assert web.sent - before <= 1 << 16  # it is asked which version there is
        web.put("gzip.h5", web.files["chunked.h5"])
        equal(epochs(web.url("gzip.h5"), 2, **settings), epochs(folder / "chunked.h5", 2))

    def test_killed_process_leaves_no_damaged_block(self, web, tmp_path, folder):
        wanted = sum(float(np.sum(x, dtype="f8")) for x, y in epochs(folder / "gzip.h5"))
        arguments = [sys.executable, CHILD, "cached", web.url("gzip.h5"), str(tmp_path / "cache"), "16MiB"]
        running = [subprocess.Popen([*arguments, "forever"], stdout=subprocess.DEVNULL) for _ in range(2)]
        cached = lambda: sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").glob("*.blocks"))  # noqa: E731
        until(lambda: cached() >= 200_000, 300)
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert cached() >= 200_000
        got = epochs(web.url("gzip.h5"), remote={"cache": tmp_path / "cache", "cache_size": "16MiB"})
        assert sum(float(np.sum(x, dtype="f8")) for x, y in got) == wanted


class TestEnding:
    def test_close_does_not_wait_for_a_silent_server(self, web, new_threads):
        train = H5ChunkSequence(web.url("gzip.h5"), memory_budget=BUDGET)
        web.fault = lambda *request: ("wait", 60)
        failures = []

        def read():
            try:
                list(train)
            except UsageError as error:
                failures.append(str(error))

        reading = threading.Thread(target=read)
        reading.start()
        while len(web.log) < 4:
            time.sleep(0.01)
        begun = time.monotonic()
        train.close()
        reading.join(30)
        assert time.monotonic() - begun < 30 and "was closed while it was being read" in failures[0]
        assert not new_threads()

    def test_ctrl_c_interrupts_waiting(self, web):
        process = subprocess.Popen(
            [sys.executable, CHILD, "interrupted", web.url("gzip.h5")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        web.fault = lambda *request: ("wait", 300)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
        assert process.returncode != 0 and "KeyboardInterrupt" in said
