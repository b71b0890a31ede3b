"""Parts of remote reading without a network: redaction of URLs, joining of ranges, settings, and the disk cache."""

from __future__ import annotations

import itertools
import os
import time

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import quote
from kerasmem.hdf5.format.urls import identity, is_url, redact
from kerasmem.hdf5.io.access import ahead_bytes, read_remote
from kerasmem.hdf5.io.cache import BLOCK, DiskCache
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
    def test_redact_hides_secrets(self, url):
        assert "SECRET" not in redact(url)
        assert "SECRET" not in quote(url)
        assert "host" in redact(url) or "@h/b.zip" in redact(url)

    def test_identity_ignores_signatures(self):
        one = "https://u:p@h/a.h5?X-Amz-Signature=1&X-Amz-Date=2&part=7"
        assert identity(one) == identity("https://h/a.h5?part=7&X-Amz-Signature=9")
        assert identity(one) != identity("https://h/a.h5?part=8")

    def test_patterns(self):
        assert is_pattern("s3://b/part-?.h5") and is_pattern("https://h/p-*.h5")
        assert not is_pattern("https://h/a.h5?id=*1") and not is_pattern("s3://b/a.h5")


def test_synchronous_file_system_in_a_fresh_process(program, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = range(9)
    code = (
        "import sys, fsspec\nfrom kerasmem.streaming.data_source import read_windows\n"
        "fsspec.filesystem('memory').pipe('/a.h5', open(sys.argv[1], 'rb').read())\n"
        "((_, window),) = read_windows(['memory://a.h5'], ['x'])\n"
        "print(window['x'].tolist())"
    )
    done = program("-c", code, tmp_path / "a.h5")
    assert done.out.strip() == str(list(range(9))), done.err


class TestRanges:
    @given(
        st.lists(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 60)), max_size=2), min_size=1, max_size=12),
        st.integers(0, 8),
        st.integers(20, 200),
    )
    def test_join_extents_covers_each_extent_once(self, needs, gap, most):
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
            ({"key": "k"}, "remote: must be keyed by .* got 'key'.*storage_options"),
            ({"storage_options": ["no"]}, "storage_options: must be a dict"),
            ({"storage_options": {"f": lambda: "SECRET"}}, "storage_options: must be picklable"),
            ({"cache_size": "1GiB"}, "needs a folder"),
            ({"cache": 3}, "cache must be the path"),
            ({"cache": __file__}, "must be a folder"),
            ({"cache": "c", "cache_size": "many"}, "cache_size"),
        ],
    )
    def test_wrong(self, settings, message):
        with pytest.raises(UsageError, match=message):
            read_remote(settings)

    def test_options_are_not_shown(self):
        assert "SECRET" not in repr(read_remote({"storage_options": {"secret": "SECRET"}}))

    def test_ahead_bytes_use_the_rest_of_the_budget(self):
        assert ahead_bytes(None, 5) == 32 * MIB
        assert ahead_bytes(64 * MIB, 60 * MIB) == 4 * MIB
        assert ahead_bytes(1 * MIB, 1 * MIB) == MIB // 4


class TestCache:
    def test_written_blocks_are_read_again(self, tmp_path):
        cache = DiskCache(str(tmp_path / "c"), 64 * MIB)
        data = os.urandom(3 * BLOCK + 100)
        cache.write("k", 4, memoryview(data))
        for one in (cache, DiskCache(cache.folder, 64 * MIB)):
            blocks = one.read("k", 3, 9)
            assert [block is None for block in blocks] == [True, False, False, False, False, True]
            assert b"".join(blocks[1:5]) == data
            assert one.read("other", 4, 5) == [None]

    def test_damaged_block_is_a_miss(self, tmp_path):
        cache = DiskCache(str(tmp_path), 64 * MIB)
        cache.write("k", 0, memoryview(os.urandom(2 * BLOCK)))
        (path,) = tmp_path.iterdir()
        stored = bytearray(path.read_bytes())
        stored[100] ^= 1
        path.write_bytes(stored)
        assert [block is None for block in cache.read("k", 0, 2)] == [True, False]
        path.write_bytes(stored[:-1])
        assert cache.read("k", 0, 2) == [None, None]

    def test_the_least_recently_used_file_is_evicted(self, tmp_path):
        (tmp_path / "mine.txt").write_bytes(bytes(20 * MIB))  # no file of the cache
        cache = DiskCache(str(tmp_path), 16 * MIB)
        for number, key in enumerate("abcd"):
            cache.write(key, 0, memoryview(bytes(3900 << 10)))
            os.utime(tmp_path / f"{key}.blocks", (time.time() - 1000 + number,) * 2)
        assert cache.read("a", 0, 1) != [None]  # used just now
        cache.write("e", 0, memoryview(bytes(3900 << 10)))
        assert [key for key in "abcde" if cache.read(key, 0, 1) != [None]] == ["a", "c", "d", "e"]
        cache.write("e", 256, memoryview(bytes(20 * MIB)))  # does not fit even alone
        assert cache.read("e", 0, 1) != [None] and cache.read("e", 256, 257) == [None]
        assert (tmp_path / "mine.txt").exists()

    def test_full_disk_warns_and_continues(self, tmp_path):
        (tmp_path / "c").write_text("a file in the place of the folder")
        cache = DiskCache(str(tmp_path / "c" / "d"), 64 * MIB)
        with pytest.warns(UserWarning, match="cannot be written to"):
            cache.write("k", 0, memoryview(bytes(10)))
        cache.write("k", 0, memoryview(bytes(10)))
        assert cache.read("k", 0, 1) == [None]
