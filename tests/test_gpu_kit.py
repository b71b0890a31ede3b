"""A kit for a machine without network: what is zeroed, packed and put together again."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts" / "gpu_kit"
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="module")
def kit():
    """The script's modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import fatbin
        import packing
        import unpack

        yield type("Kit", (), {"fatbin": fatbin, "packing": packing, "unpack": unpack})
    for name in ("fatbin", "packing", "unpack"):
        sys.modules.pop(name, None)


PTX, CODE = 1, 2


def container(*entries):
    """A container as nvcc writes it: headers of 16 and 64 bytes."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 0, 0, capability).ljust(64, b"\0") + payload
        for kind, capability, payload in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(code):
    """What a shared library is to the kit: device code between other bytes."""
    return b"\x7fELF".ljust(64, b"\1") + code + b"\2" * 50


CODE_OF_TWO = container(
    (CODE, 75, b"a" * 40), (CODE, 80, b"b" * 48), (PTX, 90, b"p" * 24), (CODE, 90, b"c" * 56)
) + container((CODE, 80, b"d" * 8), (PTX, 80, b"q" * 16))


@pytest.mark.parametrize(
    ("cards", "kept"),
    [
        ([90], b"cq"),  # machine code, and PTX where there is none
        ([86], b"bd"),  # machine code of the same major version
        ([75], b"a"),
        ([75, 90], b"acq"),
        ([120], b"pq"),
        ([], b""),
    ],
)
def test_what_the_cards_can_run_is_kept_in_its_place(kit, tmp_path, cards, kept):
    path = tmp_path / "lib.so"
    path.write_bytes(whole := library(CODE_OF_TWO))
    zeroed = kit.fatbin.trim(path, cards)
    after = path.read_bytes()
    assert len(after) == len(whole)
    assert {letter for letter in b"abcdpq" if bytes([letter]) * 8 in after} == set(kept)
    assert zeroed == sum(one != other for one, other in zip(whole, after, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        b"",
        b"not a library",
        library(CODE_OF_TWO.replace(b"\x50\xed\x55\xba", b"\x50\xed\x55\xbb")),
        library(b"\x50\xed\x55\xba\1\0\x10\0" + b"\xff" * 80),
        container((CODE, 80, b"b" * 48))[:-8],
        container((CODE, 80, b"b" * 48)).replace(b"b" * 8, b"", 1) + b"x" * 4,
    ],
)
def test_what_holds_no_whole_container_stays(kit, tmp_path, other):
    path = tmp_path / "lib.so"
    path.write_bytes(other)
    assert kit.fatbin.trim(path, [90]) == 0 and path.read_bytes() == other


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc here")
def test_what_nvcc_writes(kit, tmp_path):
    source, path = tmp_path / "scale.cu", tmp_path / "scale.so"
    source.write_text("__global__ void scale(float *x) { x[threadIdx.x] *= 2; }")
    codes = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in (80, 90)]
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", *codes, str(source), "-o", str(path)]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"nvcc does not work here: {done.stderr[-200:]}")
    (entries,) = kit.fatbin.containers(path.read_bytes())
    assert sorted((entry.capability, entry.is_ptx) for entry in entries) == [(80, False), (90, False)]
    assert kit.fatbin.trim(path, [90]) == next(entry.size for entry in entries if entry.capability == 80)


def wheel(folder, name, files):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path


@pytest.fixture(scope="module")
def packed_once(kit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kit")
    wheels = folder / "wheels"
    wheels.mkdir()
    files = {
        "tool/__init__.py": "VALUE = 7\n",
        "tool/include/x.h": "int x;\n",
        "tool/lib.so": library(CODE_OF_TWO),
        "tool-1.0.data/purelib/tool_data.py": "OTHER = 8\n",
        "tool-1.0.data/scripts/run": "#!python\n",
        "tool/noise": bytes(range(256)) * 40 + b"".join(struct.pack("<I", n * 2654435761 % 2**32) for n in range(9000)),
    }
    wheel(wheels, "tool", files)
    return kit.packing.pack(
        folder / "parts", python=HERE, capabilities=[90], part_size=640_000, needs=["tool"], wheels=wheels, preset=0
    )


@pytest.fixture
def parts(packed_once, tmp_path):
    """A copy of a kit's parts."""
    return Path(shutil.copytree(packed_once.parts[0].parent, tmp_path / "parts"))


def unpack(parts, *arguments, cwd):
    return subprocess.run(
        [sys.executable, str(parts / "unpack.py"), *arguments], capture_output=True, text=True, cwd=cwd
    )


def test_a_kit_runs_where_nothing_is_installed(packed_once, parts, tmp_path):
    result = packed_once
    assert len(result.parts) > 1 and all(part.stat().st_size <= 640_000 for part in result.parts)
    assert result.packed == sum(part.stat().st_size for part in result.parts)
    assert set(result.sizes) >= {"tool", "tool_data.py", "kerasmem"}
    assert result.packed * 0.2 < sum(result.sizes.values()) <= result.packed  # the last block is not a whole one
    assert result.left_out == len("int x;\n") and result.zeroed == 40 + 48 + 24 + 8
    done = unpack(parts, "--into", "there", cwd=tmp_path)
    assert not done.returncode, done.stderr
    there = tmp_path / "there"
    code = "import tool, tool_data, kerasmem.units; print(tool.VALUE, tool_data.OTHER, kerasmem.units.__file__)"
    ran = subprocess.run([there / "run", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.split() == ["7", "8", str(there / "kerasmem" / "kerasmem" / "units.py")], ran.stderr
    assert (there / "kerasmem" / "scripts" / "bench" / "gpu_truth.py").is_file()
    again = unpack(parts, "--into", "there", cwd=tmp_path)
    assert again.returncode == 1 and "exists already" in again.stderr


def test_a_part_that_is_absent_or_damaged_is_named_and_nothing_is_written(parts, tmp_path):
    last = max(parts.glob("kit.0*"))
    data = last.read_bytes()
    last.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = unpack(parts, cwd=tmp_path)
    last.unlink()
    absent = unpack(parts, cwd=tmp_path)
    manifest = parts / "kit.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"python": "3.99"}))
    another = unpack(parts, cwd=tmp_path)
    manifest.write_text("{")
    broken = unpack(parts, cwd=tmp_path)
    for done, words in (
        (damaged, f"{last.name}: its checksum is another"),
        (absent, f"{last.name}: No such file"),
        (another, "the kit is for Python 3.99"),
        (broken, "kit.json: "),
    ):
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_what_cannot_be_packed(kit, tmp_path, monkeypatch):
    bad = wheel(tmp_path, "bad", {"../outside.py": "x = 1\n"})
    with pytest.raises(kit.unpack.KitError, match=r"'\.\./outside\.py' is outside"):
        kit.packing.lay_out([bad], tmp_path / "there")
    with pytest.raises(kit.unpack.KitError, match="no wheels for Python"):
        kit.packing.download(tmp_path / "fetched", HERE, ["no-such-thing"], tmp_path)
    with pytest.raises(kit.unpack.KitError, match="exists already"):
        kit.packing.pack(tmp_path, python=HERE, capabilities=[90], part_size=1000, needs=[])
    assert any(need.startswith("tensorflow[and-cuda]>=") for need in kit.packing.requirements())


def test_a_module_that_is_only_imported_is_emptied(kit, tmp_path):
    (module,) = kit.packing.EMPTIED
    files = {module: "code" * 9, "nvidia/curand/lib/libcurand.so.10": "code", "nvidia/cufft/lib/libcufft.so.11": "code"}
    assert kit.packing.lay_out([wheel(tmp_path, "some", files)], tmp_path / "there") == 40
    found = {path.name: path.read_text() for path in (tmp_path / "there").rglob("*.[sp][oy]*")}
    assert found == {"_pywrap_profiler_plugin.py": "", "libcufft.so.11": "code"}


def test_what_is_only_opened_keeps_no_device_code(kit, tmp_path):
    """cuSOLVER is run: the orthogonal initializer of recurrent layers decomposes a matrix on the card."""
    for name, kept in (("cufft", False), ("cusolver", True), ("cudnn", True)):
        path = tmp_path / name / "nvidia" / name / "lib" / f"lib{name}.so.12"
        path.parent.mkdir(parents=True)
        path.write_bytes(library(CODE_OF_TWO))
        kit.packing.trim_libraries(tmp_path / name, [90])
        assert (b"c" * 56 in path.read_bytes()) == kept


def test_the_parts_are_divided_among_the_packages(kit, monkeypatch):
    monkeypatch.setattr(kit.packing, "_BLOCK", 1000)
    marks = [(0, "kerasmem"), (500, "nvidia/cublas"), (2500, "tensorflow")]
    assert kit.packing._shares(marks, [100, 400, 200]) == {"nvidia/cublas": 550, "tensorflow": 100, "kerasmem": 50}
    names = ("kerasmem/a/b", "packages/nvidia/cublas/lib/x.so", "packages/keras/x.py", "packages", "packages/nvidia")
    assert [kit.packing._package(name) for name in names] == [
        "kerasmem", "nvidia/cublas", "keras", "packages", "nvidia"
    ]  # fmt: skip


def test_no_python_of_the_kits_version(tmp_path):
    done = subprocess.run(
        [sys.executable, str(FOLDER), "check", str(tmp_path), "--with", "python3.99"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "python3.99 is not here" in done.stderr and "Traceback" not in done.stderr


def test_parts_are_read_as_one(kit, tmp_path):
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes([number]) * number * 700_000)
    whole = io.BufferedReader(kit.unpack.Parts([tmp_path / str(number) for number in range(3)]), 4096)
    assert whole.read() == bytes([1]) * 700_000 + bytes([2]) * 1_400_000
