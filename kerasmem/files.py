"""Files and folders: safe opening, atomic replacement, JSON, and NumPy's archives.

`SECURITY.md` documents these rules:

- Links in a path from the user are followed.
- Files with names from kerasmem (temporary and cached files) are never opened through a link (`open_plain`,
  `replace_file`).
- A folder for files that outlive a run belongs to the user (`own_folder`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
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
_PART, _ABANDONED = ".part", 3600  # suffix of temporary files; seconds without a write
_OPEN_FILES = ("/dev/std", "/dev/fd/", "/proc/")  # cannot be replaced
_seeking = threading.Lock()
READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # for `os.open`, on any system
_PLAIN = READ | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_plain(path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file without following a link or waiting for a pipe, and return its descriptor.

    Raises:
        OSError: If the path is not a regular file or cannot be opened; `strerror` has the reason.
    """
    try:
        descriptor = os.open(path, flags | _PLAIN, mode)
    except OSError:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "is a link, which is not followed; remove it", path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file; remove it", path)
    return descriptor


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read into a view from an offset in an open file, as `os.preadv`, also on Windows.

    Returns:
        The number of bytes read. It may be lower than the view's size, and not only at the end of the file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


def read_bytes(descriptor: int, size: int, offset: int) -> bytes:
    """Read at most `size` bytes at an offset in an open file."""
    data = bytearray(size)
    return bytes(data[: read_at(descriptor, memoryview(data), offset)])


def write_named(path: str, data: bytes) -> None:
    """Write a file at a user's path atomically, or write to a device or a pipe.

    Raises:
        OSError: If it cannot be written.
    """
    if path.startswith(_OPEN_FILES) or (os.path.exists(path) and not os.path.isfile(path)):
        Path(path).write_bytes(data)
    else:
        with replace_file(os.path.realpath(path)) as file:
            file.write(data)


def own_folder(name: str, path: str) -> None:
    """Create a folder that only this user can access, or check that an existing one belongs to this user.

    Args:
        name: the argument's name in the error message.
        path: the folder; its parent exists.

    Raises:
        UsageError: If the path is a link, is not a folder, or belongs to another user.
        OSError: If the folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    refuse_foreign(name, path)


def refuse_foreign(name: str, path: str) -> None:
    """Refuse a folder that is a link or belongs to another user. It need not exist yet.

    Raises:
        UsageError: If the path is a link, is not a folder, or belongs to another user.
    """
    if not os.path.lexists(path):
        return
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0)):
        raise UsageError(f"{name} must be a folder of yours, not a link or another user's; got {path!r}")


@contextlib.contextmanager
def replace_file(path: str, *, durable: bool = False, before: str | None = None) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces another one when the block succeeds.

    The temporary file has a unique name in the same folder, so several processes can replace one file.

    Args:
        path: the file to replace. A link is replaced, not followed.
        durable: flush the file to disk first, and remove temporary files that killed writers left.
        before: new name of the previous file. It is removed by default.

    Raises:
        OSError: If the file cannot be written.
    """
    folder, name = os.path.split(path)
    prefix = f".{name[:50]}."
    temporary = os.path.join(folder, f"{prefix}{os.urandom(8).hex()}{_PART}")
    if durable:
        _remove_abandoned(folder or ".", prefix)
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


def _remove_abandoned(folder: str, prefix: str) -> None:
    """Remove temporary files with this prefix that were not written to for an hour."""
    for path in Path(folder).glob(f"{glob.escape(prefix)}*{_PART}"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED:
                path.unlink()


def read_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: If the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file contains anything else or cannot be read.

    Raises:
        InputError: If the object is nested too deeply.
    """
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST_OBJECT:
            return None
        data = Path(path).read_bytes()
        value = json.loads(data) if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") else None
    except RecursionError:
        raise InputError(f"{path}: its JSON is nested too deeply; write it again") from None
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@functools.cache
def package_data(package: str, name: str) -> Any:
    """Load `data/NAME.json` of a package. It is cached, so do not modify it."""
    return json.loads(pkgutil.get_data(package, f"data/{name}.json") or b"")


@contextlib.contextmanager
def open_archive(file: BinaryIO) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the arrays of a `numpy.savez` file that may be damaged. Each is read and its checksum verified on access.

    Raises:
        ValueError: If the file is not such an archive, or its arrays claim more bytes than it has.
    """
    import zipfile

    from numpy.lib.npyio import NpzFile

    try:
        with zipfile.ZipFile(file) as archive:
            _check_entries(archive, file.seek(0, os.SEEK_END))
    except Exception as error:  # NumPy parses headers as Python code, and passes its tokenizer's and parser's errors on
        raise ValueError(str(error) or type(error).__name__) from None
    with NpzFile(file) as arrays:  # does not unpickle
        yield arrays


def _check_entries(archive: zipfile.ZipFile, size: int) -> None:
    entries = archive.infolist()
    start, total = min((entry.header_offset for entry in entries), default=0), sum(entry.file_size for entry in entries)
    if start or total > size:
        raise ValueError(f"its arrays claim {total:,} bytes from {start:,}, and the file has {size:,}")
    for entry in entries:
        if entry.compress_type or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename!r} is compressed or encrypted")
        with archive.open(entry) as member:
            shape, _, dtype = read_npy_header(member)
            if math.prod(shape) * dtype.itemsize != entry.file_size - member.tell():
                raise ValueError(f"{entry.filename!r} claims {shape} {dtype}, and has {entry.file_size:,} bytes")


def read_npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array in NumPy's format: shape, whether it is in Fortran order, and dtype.

    Raises:
        Exception: If the header is damaged. NumPy, zipfile and Python's parser raise many types.
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
        raise ValueError(f"its type {dtype} contains arrays")
    if version == (3, 0) and dtype.names is not None:
        # Version 3 has UTF-8 names. NumPy has no public function for it, and version 2's decodes Latin-1.
        dtype.names = tuple(name.encode("latin-1").decode("utf-8") for name in dtype.names)
    return shape, fortran, dtype
