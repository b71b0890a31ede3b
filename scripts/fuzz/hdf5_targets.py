"""Changed HDF5 files: all structures, or the chunk indexes."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from cases import FINDS, HEAP, SECRET, Case, Report, Target, Verdict, fill_heap, judge_commands
from hdf5_checksums import find_sums, put_sums
from mutation import Zone, mutate

_LARGEST = 32 << 20  # bytes of a dataset that is compared with the judge
_STRUCTURES = re.compile(
    rb"OHDR|OCHK|TREE|SNOD|HEAP|GCOL|FRHP|FHDB|FHIB|FSHD|FSSE|FAHD|FADB|EAHD|EAIB|EASB|EADB|BTHD|BTIN|BTLF"
)
_INDEXES = re.compile(rb"TREE|FAHD|FADB|EAHD|EAIB|EASB|EADB|BTHD|BTIN|BTLF")

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("inspect", "x.h5", "--json"), ("stats", "x.h5", "--json"),
    ("convert", "x.h5", "-o", "out.h5"), ("convert", "x.h5", "-o", "out.h5", "--shuffle", "--json"),
    ("convert", "x.h5", "-o", "out.h5", "--split", "0.5,0.5", "--compression", "gzip"),
    ("repack", "x.h5", "-o", "out.h5"),
)  # fmt: skip


class Hdf5Target(Target):
    """Changed HDF5 files, compared with h5py."""

    def prepare(self, folder: Path) -> None:
        """Import the HDF5 readers, and make sound files."""
        warm_data_commands()
        self.seeds = self.make_seeds()
        self.sums = {name: find_sums(data) for name, data in self.seeds.items()}
        self.zones = {name: self.find_zones(data) for name, data in self.seeds.items()}

    def make_seeds(self) -> dict[str, bytes]:
        """Return sound files by name."""
        raise NotImplementedError

    def find_zones(self, data: bytes) -> list[Zone]:
        """Return the ranges of a file with most of the changes."""
        return []

    def make(self, draw: random.Random) -> Case:
        """Return a changed file, usually with correct checksums, and a command."""
        seed = draw.choice(list(self.seeds))
        origin = self.seeds[seed]
        resize = draw.random() < 0.3
        zones = self.zones[seed] if draw.random() < 0.8 else []
        data = mutate(origin, draw, zones, resize=resize)
        options: dict[str, object] = {"seed": seed if draw.random() < 0.9 else ""}
        command = (("data", *draw.choice(COMMANDS)),) if draw.random() < 0.4 else ()
        options["twice"] = draw.random() < 0.3
        case = Case({"x.h5": data}, command, {"x.h5": origin}, seed, options)
        return Case({"x.h5": self.seal(case, data)}, case.commands, case.origin, seed, options)

    def seal(self, case: Case, data: bytes) -> bytes:
        """Return a file with correct checksums, unless the case has none."""
        seed = case.options.get("seed")
        return put_sums(data, self.seeds[seed], self.sums[seed]) if isinstance(seed, str) and seed else data

    def attempt(self, case: Case, report: Report) -> Verdict:
        """Run the command if there is one, read all datasets, and compare them with h5py."""
        fill_heap(1)
        verdict = judge_commands(case, report)
        if verdict.kind not in FINDS:
            verdict = judge_reading("x.h5", verdict, report, twice=bool(case.options.get("twice")))
        if verdict.kind == "lenient" and case.options.get("odd"):
            return Verdict("ok with odd filter parameters")  # which only writers need
        return verdict

    def library(self, case: Case) -> None:
        """Read everything with h5py."""
        read_everything("x.h5")


def read_everything(path: str) -> None:
    """Read all attributes and datasets of a file with h5py, ignoring its errors."""
    import h5py

    def look(thing: Any) -> None:
        with contextlib.suppress(Exception):
            for name in list(thing.attrs)[:100]:
                with contextlib.suppress(Exception):
                    thing.attrs[name]
        if isinstance(thing, h5py.Dataset):
            with contextlib.suppress(Exception):
                thing.id.chunk_iter(lambda info: None)
            for part in ((), slice(0, None)):
                with contextlib.suppress(Exception):
                    if thing.nbytes < _LARGEST:
                        thing[part]
        elif isinstance(thing, h5py.Group):
            for name in itertools.islice(thing, 100):
                with contextlib.suppress(Exception):
                    seen.append(name)
                    if len(seen) < 1000:
                        look(thing[name])

    seen: list[str] = []
    fill_heap(1)
    with h5py.File(path, "r") as file:
        with contextlib.suppress(Exception):
            file.id.links.visit(lambda name, info: None, info=True)
        look(file)


def warm_data_commands() -> None:
    """Import the modules of the data commands before there are threads."""
    import deflate  # noqa: F401
    import h5py
    import hdf5plugin  # noqa: F401
    import imagecodecs

    import kerasmem.cli.data_command
    import kerasmem.datatools.conversion
    import kerasmem.datatools.inspection
    import kerasmem.datatools.statistics
    import kerasmem.rendering.data_tables
    import kerasmem.rendering.formatting  # noqa: F401

    h5py.get_config()
    for name in ("zstd_decode", "lzf_decode", "blosc_decode", "lz4h5_decode", "bitshuffle_decode", "lz4_decode"):
        getattr(imagecodecs, name)


def judge_reading(path: str, verdict: Verdict, report: Report, *, twice: bool = True) -> Verdict:
    """Compare the datasets of a file, read by kerasmem and by h5py.

    Args:
        path: The file.
        verdict: Verdict of the commands.
        report: Reports the present stage.
        twice: Whether to read twice, with other bytes in freed memory.
    """
    report("reading")
    ours = read_ours(path)
    fill_heap(2)
    again = read_ours(path) if twice else {}
    for name, values in ours.items():
        if name in again and not same(values, again[name]):
            return Verdict("unstable", f"{codes_of(path, name)}: two readings differ")
        if HEAP in values.tobytes():
            return Verdict("leak", f"{name}: memory in the data")
        if SECRET in values.tobytes():
            return Verdict("outside", f"{name}: another file's bytes in the data")
    if not ours:
        return verdict
    report("judge")
    judged = read_h5py(path, ours)
    fill_heap(3)
    for name, values in ours.items():
        expected = judged[name]
        if isinstance(expected, str):
            if has_other_level(path, name) or is_sound_by_checksum(path, name):
                continue
            return Verdict("lenient", f"{codes_of(path, name)}: h5py: {expected}")
        if not same(values, expected):
            if not same(expected, next(iter(read_h5py(path, {name: values}).values()))):
                return Verdict("judge unstable")
            if hidden_chunks(path, name):
                return Verdict("ok, more chunks than HDF5 finds")
            return Verdict("wrong", f"{codes_of(path, name)}: {describe(values, expected)}")
    return verdict if verdict.kind == "refused" else Verdict("ok and as h5py")


def read_ours(path: str) -> dict[str, np.ndarray]:
    """Return the datasets that kerasmem reads, without refused ones."""
    from kerasmem.datatools.listing import list_contents
    from kerasmem.errors import KerasmemError
    from kerasmem.streaming.data_source import read_windows

    arrays = {}
    try:
        usable = list_contents(path).usable
    except KerasmemError:
        return {}
    for name, entry in itertools.islice(usable.items(), 40):
        if entry.layout is None or entry.layout.rows * entry.layout.row_bytes > _LARGEST:
            continue
        try:
            windows = [window[name].copy() for _, window in read_windows([path], [name], threads=1)]
        except KerasmemError:
            continue
        arrays[name] = np.concatenate(windows)
    return arrays


def read_h5py(path: str, wanted: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the values that h5py reads, or the text of its error."""
    import h5py

    values: dict[str, Any] = {}
    try:
        with h5py.File(path, "r") as file:
            for name in wanted:
                dataset = file[name.encode("utf-8", "surrogateescape")]
                for part in ((), slice(0, None)):  # of some virtual datasets HDF5 reads all rows and not the whole
                    try:
                        values[name] = dataset[part]
                        break
                    except Exception as error:
                        values[name] = f"{type(error).__name__}: {error}"
    except Exception as error:
        return {name: values.get(name, f"{type(error).__name__}: {error}") for name in wanted}
    return values


def hidden_chunks(path: str, name: str) -> bool:
    """Return whether an index lists chunks that HDF5 itself cannot find because their keys are damaged."""
    import h5py

    with h5py.File(path, "r") as file:
        dataset = file[name]
        listed: list[Any] = []
        if not dataset.chunks:
            return False
        dataset.id.chunk_iter(listed.append)
        for chunk in listed:
            try:
                dataset.id.read_direct_chunk(chunk.chunk_offset)
            except (OSError, RuntimeError, ValueError):
                return True
        return False


def filters_of(path: str, name: str) -> list[tuple[int, tuple[int, ...]]]:
    """Return code and numbers of the filters of a dataset."""
    import h5py

    with h5py.File(path, "r") as file:
        creation = file[name].id.get_create_plist()
        filters = [creation.get_filter(number) for number in range(creation.get_nfilters())]
        return [(code, numbers) for code, _, numbers, _ in filters]


def has_other_level(path: str, name: str) -> bool:
    """Return whether a compression level is unknown to HDF5. Reading does not need it."""
    return any(code == 1 and (len(numbers) != 1 or numbers[0] > 9) for code, numbers in filters_of(path, name))


def is_sound_by_checksum(path: str, name: str) -> bool:
    """Return whether the Adler-32 checksum of all zlib chunks is correct.

    libdeflate takes 286 and 287 for lengths of 258 bytes, as 285; zlib refuses them.
    """
    import deflate
    import h5py

    if [code for code, _ in filters_of(path, name)][-1:] != [1]:
        return False
    with h5py.File(path, "r") as file:
        dataset = file[name]
        listed: list[Any] = []
        dataset.id.chunk_iter(listed.append)
        most = 2 * int(np.prod(dataset.chunks)) * dataset.dtype.itemsize
        try:
            for chunk in listed:
                mask, stored = dataset.id.read_direct_chunk(chunk.chunk_offset)
                if mask or zlib.adler32(deflate.zlib_decompress(stored, most)) != int.from_bytes(stored[-4:], "big"):
                    return False
        except Exception:
            return False
        return True


def codes_of(path: str, name: str) -> str:
    """Return the filters of a dataset as text, to tell finds apart."""
    return "filters " + "+".join(str(code) for code, _ in filters_of(path, name))


def same(one: np.ndarray, other: Any) -> bool:
    """Return whether two arrays hold the same bits, or the same truth values: h5py keeps damaged bytes of these."""
    other = np.asarray(other)
    if one.dtype == other.dtype == bool:
        one, other = one.view("u1") != 0, other.view("u1") != 0
    if one.dtype == other.dtype:
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def describe(one: np.ndarray, other: np.ndarray) -> str:
    """Describe how two arrays differ."""
    other = np.asarray(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {one.shape} in place of {other.dtype} {other.shape}"
    differ = np.frombuffer(one.tobytes(), "u1") != np.frombuffer(other.tobytes(), "u1")
    return f"{one.dtype}: {int(differ.sum())} of {len(differ)} bytes differ"


class WholeTarget(Hdf5Target):
    """All structures of a file."""

    name = "hdf5"

    def make_seeds(self) -> dict[str, bytes]:
        """Return files of all structures."""
        from hdf5_seeds import whole_files

        return whole_files()

    def find_zones(self, data: bytes) -> list[Zone]:
        """Return the structures with a signature, and the first object's header."""
        return [(0, 1024), *((at.start(), at.start() + 300) for at in _STRUCTURES.finditer(data))]


class IndexTarget(Hdf5Target):
    """Chunk indexes of all kinds."""

    name = "indexes"

    def make_seeds(self) -> dict[str, bytes]:
        """Return files with chunk indexes of all kinds."""
        from hdf5_seeds import index_files

        return index_files()

    def find_zones(self, data: bytes) -> list[Zone]:
        """Return the indexes, and the headers that refer to them."""
        zones = [(at.start(), at.start() + 200) for at in _INDEXES.finditer(data)]
        return zones + [(at.start(), at.start() + 300) for at in re.finditer(rb"OHDR|OCHK", data)] or [(0, 1024)]
