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
# What training does not open: headers, static libraries, the compilers of CUDA C++ (XLA has LLVM in itself and takes
# libdevice and ptxas), profilers, what kernels of users' own take of NCCL, cuRAND (TensorFlow names it nowhere).
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
    "nvidia/cuda_nvcc/nvvm/lib64/*",
    "nvidia/curand/*",
    "nvidia/nccl/lib/libnccl_device.*",
    "nvidia/cuda_cupti/*",
    "nvidia/cuda_nvrtc/lib/*.alt.so*",
    "nvidia/cusolver/lib/libcusolverMg*",
    "tensorflow/compiler/tf2xla/ops/_xla_ops.so",
    "tensorflow/compiler/mlir/stablehlo/stablehlo_extension.so",
    "clang/*",
    "*/__pycache__/*",
)
# Modules that TensorFlow only imports, to be asked by a profiler elsewhere: an empty one takes the place of each.
EMPTIED = ("tensorflow/python/profiler/internal/_pywrap_profiler_plugin.so",)
# TensorFlow opens these at its start; no model of the bench runs their device code on one card. (cuSOLVER's is run: the
# orthogonal initializer of recurrent layers decomposes a matrix.)
ONLY_PRESENT = tuple(f"nvidia/{name}/*" for name in ("cufft", "cusparse", "nccl"))


@dataclass(frozen=True)
class Kit:
    """What a kit holds and how large it is.

    Attributes:
        parts: files that were written, without the manifest and the script that unpacks them.
        packed: bytes of all parts.
        unpacked: bytes of the packages and the checkout.
        zeroed: bytes of device code that the cards do not need.
        left_out: bytes of files that training does not open.
        sizes: about how many bytes of the parts each package takes, the largest first.
    """

    parts: tuple[Path, ...]
    packed: int
    unpacked: int
    zeroed: int
    left_out: int
    sizes: dict[str, int]


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
    command = [_python(python), "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(into)]
    command += ["--python-version", python, "--implementation", "cp", "--abi", f"cp{python.replace('.', '')}"]
    command += ["--abi", "abi3", "--abi", "none", *(f"--platform={name}_x86_64" for name in _PLATFORMS)]
    if wheels:
        command += ["--no-index", "--find-links", str(wheels)]
    done = subprocess.run([*command, *needs], capture_output=True, text=True)
    if done.returncode:
        raise KitError(f"pip found no wheels for Python {python}:\n{done.stderr.strip()}")
    return sorted(into.glob("*.whl"))


def _python(version: str) -> str:
    """A Python of that version with pip, if there is one: pip reads markers such as `python_version` for its own."""
    found = None if version == f"{sys.version_info[0]}.{sys.version_info[1]}" else shutil.which(f"python{version}")
    if found and not subprocess.run([found, "-m", "pip", "--version"], capture_output=True).returncode:
        return found
    return sys.executable


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
                path = into / (name if name not in EMPTIED else f"{name.removesuffix('.so')}.py")
                if not path.resolve().is_relative_to(into.resolve()):
                    raise KitError(f"{wheel.name}: {member.filename!r} is outside of the package")
                path.parent.mkdir(parents=True, exist_ok=True)
                if name in EMPTIED:
                    left_out += member.file_size
                    path.touch()
                    continue
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


def _blocks(folder: Path, marks: list[tuple[int, str]]) -> Iterator[bytes]:
    """The folder as a tar archive, in blocks of one size; it is nowhere as a whole.

    Args:
        folder: what to put in it.
        marks: takes where in the archive each package begins.
    """

    def write(end: int) -> None:
        with os.fdopen(end, "wb") as out, tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:

            def marked(member: tarfile.TarInfo) -> tarfile.TarInfo:
                if not marks or marks[-1][1] != _package(member.name):
                    marks.append((tar.offset, _package(member.name)))
                return _of_nobody(member)

            for path in sorted(folder.iterdir()):
                tar.add(path, path.name, filter=marked)

    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as writer, os.fdopen(reading, "rb") as source:  # closed first: the writer ends
        written = writer.submit(write, writing)
        while block := source.read(_BLOCK):
            yield block
        written.result()


def _package(name: str) -> str:
    """The package that a file of the kit belongs to: each of NVIDIA's libraries is one."""
    first, *rest = PurePosixPath(name).parts
    return "/".join(rest[: 2 if rest[0] == "nvidia" else 1]) if first == "packages" and rest else first


def _shares(marks: list[tuple[int, str]], compressed: list[int]) -> dict[str, int]:
    """Divide the bytes of each compressed block among the packages that lie in it."""
    sizes: dict[str, int] = {}
    ends = [start for start, _ in marks[1:]] + [len(compressed) * _BLOCK]
    for (start, name), end in zip(marks, ends, strict=True):
        for number in range(start // _BLOCK, -(-end // _BLOCK)):
            inside = min(end, (number + 1) * _BLOCK) - max(start, number * _BLOCK)
            sizes[name] = sizes.get(name, 0) + compressed[number] * inside // _BLOCK
    return dict(sorted(sizes.items(), key=lambda each: -each[1]))


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def write_parts(folder: Path, into: Path, part_size: int, preset: int = 6) -> tuple[list[Path], dict[str, int]]:
    """Compress a folder on all cores and cut it into files of a size; return them, and the share of each package."""
    parts: list[Path] = []
    marks: list[tuple[int, str]] = []
    sizes: list[int] = []
    pending = io.BytesIO()

    def add(compressed: bytes) -> None:
        sizes.append(len(compressed))
        pending.write(compressed)
        cut(part_size)

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
        for block in _blocks(folder, marks):
            waiting.append(pool.submit(lzma.compress, block, preset=preset))
            if len(waiting) > 2 * (os.cpu_count() or 1):
                add(waiting.pop(0).result())
        for compressed in waiting:
            add(compressed.result())
    cut(1)
    return parts, _shares(marks, sizes)


def pack(
    out: Path,
    *,
    python: str,
    capabilities: list[int],
    part_size: int,
    needs: list[str],
    wheels: Path | None = None,
    preset: int = 6,
) -> Kit:
    """Write a kit: parts, a manifest with their checksums, and the script that puts them together.

    Args:
        out: the folder to make.
        python: version of the Python that will run it, such as "3.12".
        capabilities: compute capabilities of the cards it is for, such as 75 and 90.
        part_size: largest size of a part in bytes.
        needs: requirements as pip reads them.
        wheels: a folder to take wheels from in place of the network.
        preset: lzma's, from 0 (some ten times as fast) to 9.

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
        parts, sizes = write_parts(kit, written, part_size, preset)
        digests = [{"name": part.name, "sha256": hashlib.sha256(part.read_bytes()).hexdigest()} for part in parts]
        manifest = {"python": python, "capabilities": capabilities, "needs": needs, "parts": digests}
        (written / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        shutil.copy2(HERE / "unpack.py", written / "unpack.py")
        packed = sum(part.stat().st_size for part in parts)
        written.rename(out)
    return Kit(tuple(out / part.name for part in parts), packed, unpacked, zeroed, left_out, sizes)
