"""Files and folders in places that others may reach: opened without following links, and replaced as a whole.

The rules, which `SECURITY.md` tells users:

- A path that a user names may end in a link, if the link is the user's own or the system administrator's
  (`follow`). Links in the folders above it are the user's affair.
- What kerasmem names itself (temporary names, the files of a cache) is never reached through a link
  (`open_plain`, `replacing`).
- A folder that kerasmem keeps files in between runs is the user's own, and nobody else may write to it (`own_folder`).

Where the system knows no links or owners (Windows, some network drives), what cannot be checked is passed over.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pkgutil
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kerasmem.errors import InputError, UsageError

_MOST_LINKS = 40
_LARGEST_OBJECT = 64 * 2**20
_LOGS = (b'{"kind"', b'{"kind ')  # the beginning of a log, each of whose lines is an object
_PART, _ABANDONED = ".part", 3600  # end of a temporary name; seconds without a write
_MAGIC = "/proc/"  # links there lead to what is open, such as /dev/stdout, and have no readable target
_NO_LINK, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
_seeking = threading.Lock()
READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # for `os.open`, on any system
_PLAIN = _NO_LINK | READ


def follow(name: str, path: str) -> str:
    """Resolve a path that may be a link, if the link is the user's own or root's.

    Args:
        name: of the argument, for the message.
        path: a file's or folder's, which need not exist.

    Raises:
        UsageError: another user has made the link.
    """
    for _ in range(_MOST_LINKS):
        try:
            found = os.lstat(path)
        except OSError:
            return path
        if not stat.S_ISLNK(found.st_mode) or path.startswith(_MAGIC):
            return path
        if _is_foreign(found):
            raise UsageError(
                f"{name}: {path!r} is a link that another user has made; remove it, or choose another place"
            )
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    raise UsageError(f"{name}: {path!r} is a link that leads to itself; remove it")


def open_plain(path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return a descriptor of a regular file; no link is followed, and no pipe waited for.

    Raises:
        OSError: it is no regular file, or cannot be opened; `strerror` says which.
    """
    try:
        number = os.open(path, flags | _PLAIN | _NO_WAIT, mode)
    except OSError:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "is a link, which is not followed here; remove it", path) from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is no regular file; remove it", path)
    return number


def open_named(name: str, path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file, device or pipe that a user has named for writing.

    Raises:
        UsageError: another user has made a link of that name.
        OSError: it cannot be opened.
    """
    found = follow(name, path)
    return os.open(found, flags | (_PLAIN & ~_NO_LINK if found.startswith(_MAGIC) else _PLAIN), mode)


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


def write_named(name: str, path: str, data: bytes) -> None:
    """Write a file that a user has named, whole or not at all; a device or a pipe takes the data as it comes.

    Raises:
        UsageError: another user has made a link of that name.
        OSError: it cannot be written.
    """
    found = follow(name, path)
    if found.startswith(_MAGIC) or (os.path.exists(found) and not os.path.isfile(found)):
        with open(found, "wb") as file:
            file.write(data)
        return
    with replacing(found) as file:
        file.write(data)


def open_kept(path: str) -> BinaryIO:
    """Open a file that an earlier run has left, unless another user may have put it there.

    Raises:
        UsageError: it is a link or no file, or it belongs to another user and lies where others may write.
        OSError: it cannot be opened.
    """
    try:
        file = os.fdopen(open_plain(path), "rb")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL):
            raise UsageError(f"{path!r} {error.strerror}") from None
        raise
    folder = os.path.dirname(path) or "."
    if _is_foreign(os.fstat(file.fileno())) and _others_write(os.stat(folder)) and _knows_owners(folder):
        file.close()
        raise UsageError(
            f"{path!r} belongs to another user and lies in a folder that others can write to; if you trust it, "
            "copy it to a folder of your own"
        )
    return file


def own_folder(name: str, path: str) -> None:
    """Make a folder that nobody else can read or write, or make sure that nobody else can write to the one there.

    Args:
        name: of what needs it, for the message.
        path: the folder; the one that holds it exists.

    Raises:
        UsageError: it is a link or no folder, belongs to another user, or others can write to it.
        OSError: it cannot be made.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        refuse_shared(name, path)


def refuse_shared(name: str, path: str) -> None:
    """Refuse a folder that is not the user's own; see `own_folder`. One that is not there yet is fine.

    Raises:
        UsageError: it is a link or no folder, belongs to another user, or others can write to it.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return
    if not stat.S_ISDIR(found.st_mode):
        link = ", but a link" if stat.S_ISLNK(found.st_mode) else ""
        raise UsageError(f"{name}: {path!r} is not a folder{link}; remove it, or choose another place")
    if _is_foreign(found) and _knows_owners(path):
        raise UsageError(
            f"{name}: the folder {path!r} belongs to another user, who can change what lies in it; remove it, or "
            "choose another place"
        )
    if _others_write(found) and _knows_owners(path):
        raise UsageError(
            f"{name}: other users can write to the folder {path!r}; if you know what lies in it, forbid that with "
            f"chmod go-w, else remove it, or choose another place"
        )


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


def _is_foreign(found: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and found.st_uid not in (os.geteuid(), 0)


def _others_write(found: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):
        return False
    by_group = bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found.st_gid)
    return by_group or bool(found.st_mode & stat.S_IWOTH)


def _is_private_group(number: int) -> bool:
    """Return whether a group is the user's alone, as many systems make one for each user."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _knows_owners(folder: str) -> bool:
    """Return whether files have an owner and a mode there: some network drives show the same ones for all."""
    import tempfile

    try:
        number, path = tempfile.mkstemp(dir=folder, prefix=".kerasmem-")
    except OSError:
        return True
    try:
        found = os.fstat(number)
        return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    finally:
        os.close(number)
        os.unlink(path)
