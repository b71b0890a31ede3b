"""Remote files without a network: what may be shown of a URL, which ranges are asked for, and the folder cache."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.format.urls import identity, is_url, redact
from kerasmem.hdf5.io.access import ahead_bytes, read_remote
from kerasmem.hdf5.io.cache import DiskCache
from kerasmem.hdf5.io.failures import ChangedError, TransientError, retry
from kerasmem.hdf5.io.objects import HEAD, PartialRange, S3Object
from kerasmem.hdf5.io.ranges import join_extents
from kerasmem.hdf5.io.remote_file import is_pattern
from kerasmem.units import MIB


class TestUrls:
    def test_urls(self):
        assert all(map(is_url, ["s3://b/k.h5", "gs://b/k", "https://h/a.h5", "memory://x"]))
        assert not any(map(is_url, ["/data/a.h5", "a.h5", "C:/a.h5", "a:b", "://x"]))

    @pytest.mark.parametrize(
        "url",
        [
            "https://user:SECRET@host/a.h5",
            "https://user:SEC/SECRET@host/a.h5",
            "https://SECRET@host/a.h5",
            "https://host/a.h5?X-Amz-Signature=SECRET&b=SECRET",
            "https://host/a.h5#SECRET",
            "error at https://u:SECRET@host/a.h5?x=SECRET, and at http://host?SECRET",
            "filecache::https://u:SECRET@host/a.h5?SECRET",
            "zip://a.h5?SECRET::https://u:SECRET@h/b.zip",
        ],
    )
    def test_secrets_are_left_out(self, url):
        assert "SECRET" not in redact(url)
        assert "SECRET" not in shown(url)
        assert "host" in redact(url) or "@h/b.zip" in redact(url)

    def test_a_link_signed_anew_is_the_same_object(self):
        one = "https://u:p@h/a.h5?X-Amz-Signature=1&X-Amz-Date=2&part=7"
        assert identity(one) == identity("https://h/a.h5?part=7&X-Amz-Signature=9")
        assert identity(one) != identity("https://h/a.h5?part=8")

    def test_patterns(self):
        assert is_pattern("s3://b/part-?.h5") and is_pattern("https://h/p-*.h5")
        assert not is_pattern("https://h/a.h5?id=*1") and not is_pattern("s3://b/a.h5")


def test_a_store_without_coroutines_is_read_in_a_process_that_knows_no_other(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = range(9)
    code = (
        "import sys, fsspec\nfrom kerasmem.streaming.data_source import read_windows\n"
        "fsspec.filesystem('memory').pipe('/a.h5', open(sys.argv[1], 'rb').read())\n"
        "((_, window),) = read_windows(['memory://a.h5'], ['x'])\n"
        "print(window['x'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.h5"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(list(range(9))), done.stderr


class FakeS3:
    """What is used of s3fs's file system: one object, and errors as botocore has them under s3fs's own."""

    def __init__(self, data):
        self.data, self.tag, self.cut, self.asked = data, '"one"', None, {}

    def split_path(self, path):
        bucket, _, key = path.partition("/")
        return bucket, key, None

    async def _call_s3(self, method, **asked):
        self.asked = asked
        if not self.data:
            raise OSError("s3fs") from FakeS3Error("InvalidRange", 416)
        if asked.get("IfMatch", self.tag) != self.tag:
            raise OSError("s3fs") from FakeS3Error("PreconditionFailed", 412)
        first, last = map(int, asked["Range"].removeprefix("bytes=").split("-"))
        part = self.data[first : last + 1]
        place = f"bytes {first}-{first + len(part) - 1}/{len(self.data)}"
        return {"ContentRange": place, "ETag": self.tag, "Body": FakeBody(part[: self.cut])}


class FakeS3Error(Exception):
    def __init__(self, code, status):
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class FakeBody(io.BytesIO):
    async def read(self, size):
        return super().read(size)


def test_an_object_of_s3_without_a_server(monkeypatch):
    monkeypatch.setattr("kerasmem.compat.files.CALL_S3", SimpleNamespace(get=lambda: None))
    system = FakeS3(os.urandom(200_000))
    found = S3Object(system, "bucket/key")
    known = asyncio.run(found.info())
    assert (known.size, known.tag, known.head) == (200_000, '"one"', system.data[:HEAD])
    into, system.cut = PartialRange(memoryview(bytearray(1000))), 100
    with pytest.raises(TransientError, match="only 100 of 1,000 bytes came"):
        asyncio.run(found.fetch(5000, into, known))
    system.cut = None
    asyncio.run(found.fetch(5000, into, known))
    assert into.view == system.data[5000:6000]
    assert (system.asked["Range"], system.asked["IfMatch"]) == ("bytes=5100-5999", '"one"')
    system.tag = '"other"'
    for ask in (lambda: found.fetch(0, PartialRange(into.view), known), lambda: found.refuse_change(known)):
        with pytest.raises(ChangedError, match="replaced or rewritten while in use"):
            asyncio.run(retry(ask))
    system.data = b""
    assert asyncio.run(found.info()).size == 0


async def body(*parts, error=None, pause=0.0):
    for part in parts:
        await asyncio.sleep(pause)
        yield part
    if error is not None:
        raise error


def test_a_body_that_comes_too_slowly_is_asked_for_again(monkeypatch):
    monkeypatch.setattr("kerasmem.hdf5.io.objects._SILENCE", 0.2)
    into = PartialRange(memoryview(bytearray(1000)))
    with pytest.raises(TransientError, match=r"only \d+ bytes came in 0.2 s"):
        asyncio.run(into.fill(body(*[b"x"] * 1000, pause=0.01)))
    assert 0 < into.done < 100


class TestRanges:
    @given(
        st.lists(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 60)), max_size=2), min_size=1, max_size=12),
        st.integers(0, 8),
        st.integers(20, 200),
    )
    def test_extents_are_all_covered_once(self, needs, gap, most):
        ranges = sorted(join_extents(needs, gap=gap, most=most))
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
        assert all(stop - start <= most for start, stop, _ in ranges)
        covered = {at for start, stop, _ in ranges for at in range(start, stop)}
        needed = {at for need in needs for start, size in need for at in range(start, start + size)}
        assert needed <= covered
        assert len(covered - needed) * 32 <= len(covered)


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (["no"], "remote: must be a dict"),
            ({"key": "k"}, "remote: 'key' is none of .*storage_options"),
            ({"storage_options": ["no"]}, "storage_options: must be a dict"),
            ({"storage_options": {"loop": 1}}, "'loop' is for kerasmem to choose"),
            ({"storage_options": {"f": lambda: "SECRET"}}, "storage_options: must be picklable"),
            ({"cache_size": "1GiB"}, "name a folder"),
            ({"cache": 3}, "cache: 3 is not a path"),
            ({"cache": __file__}, "is not a folder"),
            ({"cache": "c", "cache_size": "1MiB"}, "too small; 16.0 MiB is the least"),
            ({"cache": "c", "cache_size": "many"}, "cache_size"),
        ],
    )
    def test_wrong(self, settings, message):
        with pytest.raises(UsageError, match=message):
            read_remote(settings)

    def test_options_are_not_shown(self):
        assert "SECRET" not in repr(read_remote({"storage_options": {"secret": "SECRET"}}))

    def test_bytes_ahead_are_what_the_budget_leaves(self):
        assert ahead_bytes(None, 5) == 32 * MIB
        assert ahead_bytes(64 * MIB, 60 * MIB) == 4 * MIB
        assert ahead_bytes(1 * MIB, 1 * MIB) == MIB // 4


def blob(seed, size=MIB):
    return memoryview(bytes([seed]) * size)


class TestCache:
    def test_what_is_written_is_read_also_in_parts(self, tmp_path):
        cache = DiskCache(str(tmp_path / "c"), 64 * MIB)
        data = memoryview(os.urandom(3000))
        cache.write("k", 1000, data[:2000])
        cache.write("k", 3000, data[2000:])
        for one in (cache, DiskCache(cache.folder, 64 * MIB)):
            into = memoryview(bytearray(3000))
            assert one.read("k", 1000, into) == [] and into == data
            into = memoryview(bytearray(2500))
            assert one.read("k", 500, into) == [(500, 1000)] and into[500:] == data[:2000]
            assert one.read("k", 4500, memoryview(bytearray(10))) == [(4500, 4510)]
            assert one.read("other", 1000, into) == [(1000, 3500)]

    def test_a_spoiled_entry_is_not_served(self, tmp_path):
        cache = DiskCache(str(tmp_path), 64 * MIB)
        cache.write("k", 0, blob(1, 100))
        (entry,) = (tmp_path / "k").iterdir()
        for spoiled in (b"\1" * 99, b"\1" * 50 + b"\2" + b"\1" * 49, b""):
            entry.write_bytes(spoiled)
            assert DiskCache(cache.folder, 64 * MIB).read("k", 0, memoryview(bytearray(100))) == [(0, 100)]
            assert not entry.exists()

    def test_what_was_out_of_use_longest_goes_first(self, tmp_path):
        cache = DiskCache(str(tmp_path), 16 * MIB)
        for number in range(14):
            cache.write("k", number * MIB, blob(number))
            name = next(path for path in (tmp_path / "k").iterdir() if path.name.startswith(f"{number * MIB:x}-"))
            os.utime(name, (time.time() - 10_000 + number,) * 2)
        assert cache.read("k", 0, memoryview(bytearray(MIB))) == []  # used just now
        for number in range(14, 20):
            cache.write("k", number * MIB, blob(number))
        held = [n for n in range(20) if not cache.read("k", n * MIB, memoryview(bytearray(MIB)))]
        assert 0 in held and 1 not in held and {14, 15, 16, 17, 18, 19} < set(held)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*-*")) <= 16 * MIB

    def test_a_full_disk_ends_nothing(self, tmp_path):
        (tmp_path / "c").write_text("a file in the place of the folder")
        cache = DiskCache(str(tmp_path / "c" / "d"), 64 * MIB)
        with pytest.warns(UserWarning, match="cannot be written to"):
            cache.write("k", 0, blob(1, 10))
        cache.write("k", 0, blob(1, 10))
        assert cache.read("k", 0, memoryview(bytearray(10))) == [(0, 10)]
