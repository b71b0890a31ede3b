"""The folder beside an output in which it comes about: what is done so far, and that nobody else is at it.

Its files grow while a conversion runs, and are cut back to where a checkpoint left them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from kerasmem import files
from kerasmem.errors import DataError, KerasmemError, UsageError
from kerasmem.hdf5.layout import one_line, shown
from kerasmem.hdf5.remote.access import RemoteAccess
from kerasmem.hdf5.remote.file import RemoteFile, put_file, remove_file
from kerasmem.units import GIB

CHECKPOINT_BYTES = GIB
_CHECKPOINT_SECONDS = 20
_SUFFIX = ".kerasmem-partial"
_STATE = "state.json"
_OF_THE_DISK = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)


def folder_of(output: str) -> str:
    """Return the folder in which an output comes about."""
    return output + _SUFFIX


class Job:
    """The state of a conversion, on disk.

    A process that is killed leaves the folder behind; the same conversion started again goes on from the last
    checkpoint. One that fails removes it.

    Args:
        output: the file to be written.
        settings: what the result depends on; a folder left by other settings is not gone on with.
        discard: remove such a folder.
        folder: where it is, if not beside the output.

    Raises:
        UsageError: another process writes this output, or other settings left their work behind.
    """

    def __init__(self, output: str, settings: Mapping[str, Any], *, discard: bool, folder: str | None = None) -> None:
        self.folder = folder or folder_of(output)
        self._settings = json.loads(json.dumps(settings))
        self._written = 0
        self._since = time.monotonic()
        files.own_folder("output", self.folder)
        strange = [entry.path for entry in os.scandir(self.folder) if not entry.is_file(follow_symlinks=False)]
        if strange:
            raise UsageError(f"{shown(strange[0])}: is no file of a conversion; remove the folder {self.folder!r}")
        self._lock = os.fdopen(files.open_plain(self.path("lock"), os.O_WRONLY | os.O_CREAT), "wb")
        try:
            files.lock(self._lock, wait=False)
        except BlockingIOError:
            self.close()
            raise UsageError(f"{shown(output)}: another process is writing this output; wait for it") from None
        except OSError:
            pass  # a file system without locks
        self.state = self._read(output, discard)
        self._goes_on = bool(self.state)

    def path(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.folder, name)

    def due(self, size: int) -> bool:
        """Note that so many bytes were done; return whether it is time for a checkpoint."""
        self._written += size
        return self._written >= CHECKPOINT_BYTES or time.monotonic() - self._since > _CHECKPOINT_SECONDS

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Remember how far things are; what it speaks of has reached the disk before."""
        with files.replacing(self.path(_STATE), durable=True) as file:
            file.write(json.dumps({"settings": self._settings, "state": state}).encode())
        self.state = state
        self._written, self._since = 0, time.monotonic()

    @contextlib.contextmanager
    def ending(self, *, keeps: bool = False) -> Iterator[None]:
        """Remove the folder where the work ends or fails; keep it where the process is interrupted and can go on.

        A `UsageError` before anything was done leaves the folder of an earlier, interrupted conversion.

        Args:
            keeps: whether the folder is kept also where the work fails.

        Raises:
            DataError: what an interrupted conversion left is damaged.
        """
        try:
            yield
        except BaseException as error:
            if self.state and (keeps or isinstance(error, UsageError) or not isinstance(error, Exception)):
                self.close()
            else:
                self.remove()
            if not keeps and self._goes_on and _is_damage(error):
                raise DataError(
                    f"{shown(self.folder)}: what an interrupted conversion left there cannot be gone on with "
                    f"({one_line(str(error), 200)}); it was removed, and the same command now begins again"
                ) from error
            raise
        self.remove()

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.close()

    def _read(self, output: str, discard: bool) -> dict[str, Any]:
        """Return the state that an interrupted conversion left, or begin with an empty folder."""
        try:
            with open(files.open_plain(self.path(_STATE)), "rb") as file:
                found = files.read_json(file.read())
            same, state = found["settings"] == self._settings, dict(found["state"])
        except (OSError, ValueError, KeyError, TypeError):
            same, state, discard = False, {}, True  # killed before the first checkpoint
        if not same and not discard:
            self.close()
            raise UsageError(
                f"{shown(output)}: a conversion with other settings, or of sources that have changed since, was "
                f"interrupted; start that one again to go on with it, or give force=True (--force) to begin again"
            )
        if same:
            return state
        for name in os.listdir(self.folder):
            if name != "lock":
                os.unlink(self.path(name))
        return {}


class StoreJob(Job):
    """The state of a conversion to a store: one object beside the output there. No lock keeps another process off.

    Args:
        output: the URL to be written.
        settings: as for a `Job`.
        discard: as for a `Job`.
        folder: one on this machine, for as long as the process lives.
    """

    def __init__(self, output: str, settings: Mapping[str, Any], *, discard: bool, folder: str) -> None:
        self._object = folder_of(output)
        with contextlib.suppress(DataError), contextlib.closing(RemoteFile(self._object, RemoteAccess())) as there:
            Path(folder, _STATE).write_bytes(there.readall() or b"")
        super().__init__(output, settings, discard=discard, folder=folder)

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Remember how far things are, in the store."""
        super().checkpoint(state)
        put_file(self.path(_STATE), self._object, RemoteAccess())

    def remove(self) -> None:
        """Leave nothing behind."""
        super().remove()
        with contextlib.suppress(DataError):  # there was none, or it may not be deleted, and does no harm
            remove_file(self._object, RemoteAccess())


def _is_damage(error: BaseException) -> bool:
    """Return whether an error may come of files that are not what was written: none of the disk's, none with a name."""
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _OF_THE_DISK):
        return False
    return isinstance(error, Exception) and not isinstance(error, (KerasmemError, MemoryError))


def open_log(folder: str, name: str, size: int) -> BinaryIO:
    """Return a file, made if need be, that is cut back to a size in bytes and stands at its end.

    Raises:
        OSError: it has fewer.
    """
    file = os.fdopen(files.open_plain(os.path.join(folder, name), os.O_RDWR | os.O_CREAT), "r+b")
    if os.fstat(file.fileno()).st_size < size:
        file.close()
        raise OSError("a file of the conversion was cut off")
    file.seek(file.truncate(size))
    return file


def read_into(file: BinaryIO, array: np.ndarray, at: int) -> None:
    """Fill an array from a place in a file.

    Raises:
        OSError: the file ends before that.
    """
    file.seek(at)
    if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:  # type: ignore[attr-defined]
        raise OSError("a file of the conversion was cut off")


def sync(*written: IO[Any]) -> None:
    """Have what was written reach the disk."""
    for file in written:
        file.flush()
        os.fdatasync(file.fileno())
