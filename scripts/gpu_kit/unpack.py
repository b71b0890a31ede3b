#!/usr/bin/env python3
"""Put a kit together on a machine with a card, with Python alone: no network, no pip.

python unpack.py [--into kit]     # beside the parts; checks each part, then writes the folder
kit/run kit/kerasmem/scripts/bench/gpu_truth.py --self-check
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import lzma
import os
import shutil
import stat
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "kit.json"
RUN = """#!/bin/sh
# Run Python with what the kit brings: kit/run FILE [ARGUMENTS]
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
PYTHONPATH="$here/packages:$here/kerasmem${PYTHONPATH:+:$PYTHONPATH}" exec "${KIT_PYTHON:-%s}" "$@"
"""


class KitError(Exception):
    """A kit that cannot be put together, with what to do."""


class Parts(io.RawIOBase):
    """The bytes of all parts, one after the other, to be read once."""

    def __init__(self, paths: list[Path]) -> None:
        self._chunks = self._read(paths)
        self._left = b""

    @staticmethod
    def _read(paths: list[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    yield chunk

    def readable(self) -> bool:
        """Parts can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer with the next bytes; return how many."""
        self._left = self._left or next(self._chunks, b"")
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


def checked_parts(folder: Path) -> list[Path]:
    """Return the parts that the folder's manifest names, in order.

    Raises:
        KitError: this Python is another one than the kit was packed for, or a part is absent or damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        wanted, parts = manifest["python"], [(str(part["name"]), part["sha256"]) for part in manifest["parts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KitError(f"{folder / MANIFEST}: {error}; copy all that `scripts/gpu_kit pack` wrote") from error
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if wanted != here:
        raise KitError(f"the kit is for Python {wanted}, this is {here}; run it with python{wanted}, or pack another")
    paths = []
    for name, digest in parts:
        path = folder / Path(name).name
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise KitError(f"{path}: {error.strerror}; copy it again") from error
        if found != digest:
            raise KitError(f"{path}: its checksum is another than {MANIFEST} says; copy it again")
        paths.append(path)
    return paths


def unpack(folder: Path, into: Path) -> None:
    """Write the packages and the checkout that a kit holds.

    Args:
        folder: with the parts and their manifest.
        into: the folder to make.

    Raises:
        KitError: see `checked_parts`; or `into` is there already.
    """
    if into.exists():
        raise KitError(f"{into} exists already; name another folder with --into")
    paths = checked_parts(folder)
    part = Path(tempfile.mkdtemp(prefix=f".{into.name}.", dir=into.parent))
    try:
        whole = io.BufferedReader(Parts(paths), 1 << 20)
        with lzma.open(whole) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
            tar.extractall(part, filter="data")
        run = part / "run"
        run.write_text(RUN % sys.executable)
        run.chmod(run.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        part.chmod(0o755)
        part.rename(into)
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise KitError(f"{folder}: {error}; nothing was written") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(part)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path("kit"), help="the folder to make (default: %(default)s)")
    options = parser.parse_args()
    try:
        unpack(Path(__file__).resolve().parent, Path(os.path.abspath(options.into)))
    except KitError as error:
        print(f"unpack: {error}", file=sys.stderr)
        return 1
    print(f"{options.into}/run FILE runs Python with it", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
