"""Files and folders: opened without following links, and replaced as a whole.

The rules, which `SECURITY.md` tells users:

- Links in a path that a user names are followed.
- Names that kerasmem chooses (temporary files, files of a cache) are never reached through a link (`open_plain`,
  `replacing`).
- A folder that kerasmem keeps files in between runs belongs to the user (`own_folder`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import pkgutil
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kerasmem.errors import InputError, UsageError

if TYPE_CHECKING:
    import zipfile

    import numpy as np

_LARGEST_OBJECT = 64 * 2**20
_LOGS = (b'{"kind"', b'{"kind ')  # the beginning of a log, each of whose lines is an object
_PART, _ABANDONED = ".part", 3600  # end of a temporary name; seconds without a write
_OPEN_FILES = ("/dev/std", "/dev/fd/", "/proc/")  # what is open cannot be replaced
_seeking = threading.Lock()
READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # for `os.open`, on any system
_PLAIN = READ | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_plain(path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return a descriptor of a regular file; no link is followed, and no pipe waited for.

    Raises:
        OSError: it is no regular file, or cannot be opened; `strerror` says which.
    """
    try:
        number = os.open(path, flags | _PLAIN, mode)
    except OSError:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "is a link, which is not followed here; remove it", path) from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is no regular file; remove it", path)
    return number


def read_at(number: int, view: memoryview, offset: int) -> int:
    """Fill a view from an offset in an open file, as `os.preadv` does, also on Windows.

    Returns:
        How many bytes came; fewer than wanted where the file ends, or at any time.
    """
    if hasattr(os, "preadv"):
        return os.preadv(number, [view], offset)
    with _seeking:
        os.lseek(number, offset, os.SEEK_SET)
        data = os.read(number, len(view))
    view[: len(data)] = data
    return len(data)


def read_bytes(number: int, size: int, offset: int) -> bytes:
    """Read bytes at an offset in an open file; fewer at its end."""
    data = bytearray(size)
    return bytes(data[: read_at(number, memoryview(data), offset)])


def write_named(path: str, data: bytes) -> None:
    """Write a file that a user has named, whole or not at all; a device or a pipe takes the data as it comes.

    Raises:
        OSError: If it cannot be written.
    """
    if path.startswith(_OPEN_FILES) or (os.path.exists(path) and not os.path.isfile(path)):
        with open(path, "wb") as file:
            file.write(data)
        return
    with replacing(os.path.realpath(path)) as file:
        file.write(data)


def own_folder(name: str, path: str) -> None:
    """Make a folder that nobody else can read or write, or check the owner of the one that exists.

    Args:
        name: the argument's name, for the message.
        path: the folder; its parent exists.

    Raises:
        UsageError: If it is a link or no folder, or belongs to another user.
        OSError: If it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    refuse_foreign(name, path)


def refuse_foreign(name: str, path: str) -> None:
    """Refuse a folder that is a link or another user's. A folder that does not exist yet is fine.

    Raises:
        UsageError: If it is a link or no folder, or belongs to another user.
    """
    if not os.path.lexists(path):
        return
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{name}: {path!r} must be a folder, and no link to one; remove it, or name another")
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{name}: the folder {path!r} belongs to another user; name another one")


@contextlib.contextmanager
def replacing(path: str, *, durable: bool = False, before: str | None = None) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of another when it is whole; when the block fails, nothing has changed.

    Until then the file has a name of its own in the same folder, so that any number of processes can do so at a time.

    Args:
        path: the file to be replaced; a link there is replaced itself.
        durable: whether it reaches the disk before that. Files that killed writers have left are removed, too.
        before: the name that the file which was there gets; None to remove it.

    Raises:
        OSError: it cannot be written.
    """
    folder, name = os.path.split(path)
    start = f".{name[:50]}."
    temporary = os.path.join(folder, f"{start}{os.urandom(8).hex()}{_PART}")
    if durable:
        _remove_abandoned(folder or ".", start)
    try:
        with open(temporary, "x+b", opener=open_plain) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if before is not None and os.path.lexists(path):
            os.replace(path, before)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_abandoned(folder: str, start: str) -> None:
    """Remove temporary files with a given start of their name that nobody has written to for an hour."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(start) and entry.name.endswith(_PART):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED:
                        os.unlink(entry.path)


def read_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file holds anything else or cannot be read.

    Raises:
        InputError: If it is nested too deeply.
    """
    file = Path(path)
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_OBJECT:
            return None
        with file.open("rb") as opened:
            start = opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        if not start.startswith(b"{") or start.startswith(_LOGS):
            return None
        data = json.loads(file.read_text("utf-8-sig", errors="replace"))
    except RecursionError:
        raise InputError(f"{path}: its JSON is nested too deeply; write it again") from None
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


@functools.cache
def package_data(package: str, name: str) -> Any:
    """Load `data/NAME.json` of a package; callers must not change it."""
    return json.loads(pkgutil.get_data(package, f"data/{name}.json") or b"")


@contextlib.contextmanager
def open_archive(file: BinaryIO) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the arrays of a file that NumPy's `savez` wrote. Each is read, and its checksum compared, when it is used.

    Raises:
        ValueError: If it is no such file, or its arrays claim more bytes than it has.
    """
    import zipfile

    import numpy as np

    try:
        with zipfile.ZipFile(file) as archive:
            _check_entries(archive, file.seek(0, os.SEEK_END))
    except Exception as error:  # NumPy parses headers as Python, whose tokenizer and parser have errors of their own
        raise ValueError(str(error) or type(error).__name__) from None
    file.seek(0)
    if file.read(2) != b"PK":
        raise ValueError("it does not begin as an archive does")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        yield arrays


def _check_entries(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse an archive if its arrays claim more bytes than its file has."""
    entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    if total > size:
        raise ValueError(f"its arrays claim {total:,} bytes, and the file has {size:,}")
    for entry in entries:
        if entry.compress_type or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename!r} is compressed or encrypted")
        with archive.open(entry) as member:
            shape, _, dtype = read_npy_header(member)
            if math.prod(shape) * dtype.itemsize != entry.file_size - member.tell():
                raise ValueError(f"{entry.filename!r} claims {shape} {dtype}, and has {entry.file_size:,} bytes")


def read_npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape of an array in NumPy's format, whether its first axis runs fastest, and its type.

    Raises:
        Exception: it is none; NumPy, zipfile, and Python's parser raise whatever they meet in damaged ones.
    """
    from numpy.lib import format as npy

    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its version {version} is unknown")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if any(isinstance(extent, bool) for extent in shape) or abs(math.prod(shape)) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"its shape is {shape}")
    if dtype.subdtype is not None:
        raise ValueError(f"its type is {dtype}, an array's own")
    if version == (3, 0) and dtype.names is not None:
        # the same header in UTF-8, which NumPy has no public function for and is taken for Latin-1 here
        dtype.names = tuple(name.encode("latin-1").decode("utf-8") for name in dtype.names)
    return shape, fortran, dtype
