"""Links, pipes and other users' files at the paths that kerasmem writes to."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import kerasmem
from kerasmem import files
from kerasmem.errors import UsageError
from kerasmem.hdf5.io.access import read_remote
from kerasmem.hdf5.io.cache import DiskCache
from kerasmem.monitoring.logfile import LogFile

SOMEBODY = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
kept = b"the only copy"


@pytest.fixture
def victim(tmp_path):
    """A file that no planted link may lead to."""
    path = tmp_path / "victim"
    path.write_bytes(kept)
    yield path
    assert path.read_bytes() == kept


@pytest.fixture
def arrays(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((40, 3)), y=np.arange(40))
    return tmp_path / "d.npz"


def test_planted_link_is_replaced(tmp_path, arrays, victim):
    output = tmp_path / "out.h5"
    os.symlink(victim, output)
    kerasmem.data.convert(arrays, output, force=True)
    assert not output.is_symlink()


class TestCacheOfRemoteFiles:
    @needs_root
    def test_folder_of_another_user_is_refused(self, tmp_path):
        os.chown(tmp_path, SOMEBODY, SOMEBODY)
        with pytest.raises(UsageError, match=r"^cache must be a folder of yours"):
            read_remote({"cache": str(tmp_path)})

    def test_new_folder_is_private(self, tmp_path):
        files.own_folder("cache", str(tmp_path / "new"))
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700

    def test_folder_behind_a_link_of_the_user(self, tmp_path):
        (tmp_path / "scratch").mkdir()
        os.symlink("scratch", tmp_path / "cache")
        assert read_remote({"cache": str(tmp_path / "cache")}).cache == str(tmp_path / "scratch")

    @pytest.mark.parametrize("name", ["", "key.blocks"])
    def test_links_are_not_followed(self, tmp_path, victim, name):
        cache = DiskCache(str(tmp_path / "cache"), 2**24)
        if name:
            os.mkdir(cache.folder, 0o700)
        os.symlink(victim if name else tmp_path, os.path.join(cache.folder, name).rstrip("/"))
        with pytest.warns(UserWarning, match="cannot be written to"):
            cache.write("key", 0, memoryview(b"data"))
        assert {entry.name for entry in tmp_path.iterdir()} == {"cache", "victim"}

    def test_block_belongs_to_one_version(self, tmp_path):
        cache = DiskCache(str(tmp_path / "cache"), 2**24)
        cache.write("version1", 0, memoryview(b"data"))
        os.rename(tmp_path / "cache" / "version1.blocks", tmp_path / "cache" / "version2.blocks")
        assert cache.read("version2", 0, 1) == [None]


class TestRuns:
    def test_replacing_is_atomic_and_ignores_links(self, tmp_path, victim):
        path = tmp_path / "state"
        os.symlink(victim, tmp_path / "state")
        with files.replace_file(str(path)) as file:
            file.write(b"new")
        assert path.read_bytes() == b"new" and not path.is_symlink()
        with pytest.raises(KeyError), files.replace_file(str(path)) as file:
            file.write(b"half")
            raise KeyError
        assert path.read_bytes() == b"new" and sorted(os.listdir(tmp_path)) == ["state", "victim"]

    def test_concurrent_writers_replace_the_whole_file(self, tmp_path):
        path = str(tmp_path / "state")
        with files.replace_file(path) as slow, files.replace_file(path) as fast:
            slow.write(b"slow")
            fast.write(b"fast, and longer")
        with open(path, "rb") as file:
            assert file.read() == b"slow"
        assert os.listdir(tmp_path) == ["state"]

    def test_partial_files_are_removed_after_an_hour(self, tmp_path):
        for name, age in ((".state.01.part", 4000), (".state.02.part", 0), (".other.03.part", 4000)):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (time.time() - age,) * 2)
        with files.replace_file(str(tmp_path / "state"), durable=True):
            pass
        assert sorted(os.listdir(tmp_path)) == [".other.03.part", ".state.02.part", "state"]

    def test_open_plain_refuses_links_and_pipes(self, tmp_path, victim):
        os.symlink(victim, tmp_path / "link")
        os.mkfifo(tmp_path / "pipe")
        for name, why in (("link", "is a link, which is not followed"), ("pipe", "not a regular file")):
            with pytest.raises(OSError, match=why):
                files.open_plain(str(tmp_path / name))


class TestNamedFiles:
    def test_links_of_the_user_are_followed(self, tmp_path):
        os.symlink("log.csv", tmp_path / "link.csv")
        LogFile(tmp_path / "link.csv", append=False).close()
        assert (tmp_path / "log.csv").is_file() and (tmp_path / "link.csv").is_symlink()
        files.write_named(str(tmp_path / "link.csv"), b"whole")
        assert (tmp_path / "log.csv").read_bytes() == b"whole" and (tmp_path / "link.csv").is_symlink()

    def test_devices_and_pipes_can_be_written(self, capfd, tmp_path):
        for name in ("/dev/null", "/dev/stdout"):
            files.write_named(name, b"out")
        assert capfd.readouterr().out == "out"
        os.symlink("/dev/null", tmp_path / "null.csv")
        LogFile(tmp_path / "null.csv", append=False).close()
