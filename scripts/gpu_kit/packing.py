"""Wheels and this checkout, made small and cut into parts that a machine without network can put together."""

from __future__ import annotations

import configparser
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from fatbin import trim
from unpack import MANIFEST, KitError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_BLOCK = 32 << 20  # bytes that one thread compresses at a time
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
# What training does not open: headers, static libraries, the compiler of CUDA C++, profilers, tests.
LEFT_OUT = (
    "*/include/*.h",
    "*/include/*.hpp",
    "*/include/*.inc",
    "*/include/*.cuh",
    "tensorflow/include/*",
    "*.a",
    "nvidia/cuda_nvcc/bin/cicc",
    "nvidia/cuda_nvcc/bin/cudafe++",
    "nvidia/cuda_nvcc/bin/nvcc*",
    "nvidia/cuda_nvcc/bin/fatbinary",
    "nvidia/cuda_cupti/*",
    "nvidia/cuda_nvrtc/lib/*.alt.so*",
    "nvidia/cusolver/lib/libcusolverMg*",
    "clang/*",
    "*/__pycache__/*",
)
# TensorFlow opens these at its start, and trains the models of the bench without their device code.
ONLY_PRESENT = tuple(f"nvidia/{name}/*" for name in ("cufft", "cusolver", "cusparse", "curand", "nccl"))


@dataclass(frozen=True)
class Kit:
    """What a kit holds and how large it is.

    Attributes:
        parts: files that were written, without the manifest and the script that unpacks them.
        packed: bytes of all parts.
        unpacked: bytes of the packages and the checkout.
        zeroed: bytes of device code that the cards do not need.
        left_out: bytes of files that training does not open.
    """

    parts: tuple[Path, ...]
    packed: int
    unpacked: int
    zeroed: int
    left_out: int


def requirements() -> list[str]:
    """Return what kerasmem requires, with the CUDA libraries that TensorFlow opens."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    needs = settings["options"]["install_requires"].split("\n")
    return [re.sub(r"^tensorflow\b", "tensorflow[and-cuda]", need) for need in filter(None, needs)]


def download(into: Path, python: str, needs: list[str], wheels: Path | None) -> list[Path]:
    """Fetch wheels for another Python on x86-64 Linux; return them.

    Args:
        into: the folder for them.
        python: its version, such as "3.12".
        needs: requirements as pip reads them.
        wheels: a folder to take them from in place of the network.

    Raises:
        KitError: pip found no wheel for one of them.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(into)]
    command += ["--python-version", python, "--implementation", "cp", "--abi", f"cp{python.replace('.', '')}"]
    command += ["--abi", "abi3", "--abi", "none", *(f"--platform={name}_x86_64" for name in _PLATFORMS)]
    if wheels:
        command += ["--no-index", "--find-links", str(wheels)]
    done = subprocess.run([*command, *needs], capture_output=True, text=True)
    if done.returncode:
        raise KitError(f"pip found no wheels for Python {python}:\n{done.stderr.strip()}")
    return sorted(into.glob("*.whl"))


def lay_out(wheels: list[Path], into: Path) -> int:
    """Unpack wheels as an installation lays them out; return the bytes of what was left out.

    Raises:
        KitError: a wheel names a file outside its folder.
    """
    left_out = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = _place(member.filename)
                if name is None or member.is_dir():
                    continue
                if any(fnmatch(name, pattern) for pattern in LEFT_OUT):
                    left_out += member.file_size
                    continue
                path = into / name
                if not path.resolve().is_relative_to(into.resolve()):
                    raise KitError(f"{wheel.name}: {member.filename!r} is outside of the package")
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                if member.external_attr >> 16 & 0o111:
                    path.chmod(0o755)
    return left_out


def _place(name: str) -> str | None:
    """Where a wheel's file is installed in site-packages; None for scripts and headers."""
    parts = PurePosixPath(name).parts
    if parts and parts[0].endswith(".data"):
        return "/".join(parts[2:]) if len(parts) > 2 and parts[1] in ("purelib", "platlib") else None
    return name


def trim_libraries(packages: Path, capabilities: list[int]) -> int:
    """Zero device code that the cards do not need in all libraries of a folder; return how many bytes."""
    zeroed = 0
    for path in sorted(packages.rglob("*.so*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(packages).as_posix()
        wanted = [] if any(fnmatch(name, pattern) for pattern in ONLY_PRESENT) else capabilities
        zeroed += trim(path, wanted)
    return zeroed


def add_checkout(into: Path) -> None:
    """Copy the files that git tracks in this checkout, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise KitError(f"{ROOT} is not a git checkout: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def _blocks(folder: Path) -> Iterator[bytes]:
    """The folder as a tar archive, in blocks of one size; it is nowhere as a whole."""

    def write(end: int) -> None:
        with os.fdopen(end, "wb") as out, tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(folder.iterdir()):
                tar.add(path, path.name, filter=_of_nobody)

    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as writer, os.fdopen(reading, "rb") as source:  # closed first: the writer ends
        written = writer.submit(write, writing)
        while block := source.read(_BLOCK):
            yield block
        written.result()


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _compress(block: bytes) -> bytes:
    return lzma.compress(block, preset=6)


def write_parts(folder: Path, into: Path, part_size: int) -> list[Path]:
    """Compress a folder on all cores and cut it into files of a size; return them."""
    parts: list[Path] = []
    pending = io.BytesIO()

    def cut(least: int) -> None:
        data = pending.getvalue()
        while len(data) >= least and data:
            parts.append(into / f"kit.{len(parts):03}")
            parts[-1].write_bytes(data[:part_size])
            data = data[part_size:]
        pending.seek(0)
        pending.truncate()
        pending.write(data)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # lzma lets other threads run
        waiting: list[Future[bytes]] = []
        for block in _blocks(folder):
            waiting.append(pool.submit(_compress, block))
            if len(waiting) > 2 * (os.cpu_count() or 1):
                pending.write(waiting.pop(0).result())
                cut(part_size)
        for compressed in waiting:
            pending.write(compressed.result())
            cut(part_size)
    cut(1)
    return parts


def pack(
    out: Path,
    *,
    python: str,
    capabilities: list[int],
    part_size: int,
    needs: list[str],
    wheels: Path | None = None,
) -> Kit:
    """Write a kit: parts, a manifest with their checksums, and the script that puts them together.

    Args:
        out: the folder to make.
        python: version of the Python that will run it, such as "3.12".
        capabilities: compute capabilities of the cards it is for, such as 75 and 90.
        part_size: largest size of a part in bytes.
        needs: requirements as pip reads them.
        wheels: a folder to take wheels from in place of the network.

    Raises:
        KitError: `out` exists, a wheel is not to be had, or this is no checkout.
    """
    if out.exists():
        raise KitError(f"{out} exists already; name another folder with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        fetched, kit, written = (Path(scratch, name) for name in ("wheels", "kit", "parts"))
        for folder in (fetched, kit / "packages", kit / "kerasmem", written):
            folder.mkdir(parents=True)
        left_out = lay_out(download(fetched, python, needs, wheels), kit / "packages")
        shutil.rmtree(fetched)
        zeroed = trim_libraries(kit / "packages", capabilities)
        add_checkout(kit / "kerasmem")
        unpacked = sum(path.stat().st_size for path in kit.rglob("*") if path.is_file())
        parts = write_parts(kit, written, part_size)
        digests = [{"name": part.name, "sha256": hashlib.sha256(part.read_bytes()).hexdigest()} for part in parts]
        manifest = {"python": python, "capabilities": capabilities, "needs": needs, "parts": digests}
        (written / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        shutil.copy2(HERE / "unpack.py", written / "unpack.py")
        packed = sum(part.stat().st_size for part in parts)
        written.rename(out)
    return Kit(tuple(out / part.name for part in parts), packed, unpacked, zeroed, left_out)
