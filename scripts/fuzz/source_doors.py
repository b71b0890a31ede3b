"""What `kerasmem data convert` takes besides HDF5: images, tables, records and arrays."""

from __future__ import annotations

import csv
import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cases import HEAP, Case, Door, Told, Verdict, fill_heap, judge_command, run_command
from hdf5_doors import warm_data_commands
from mutation import mutate, mutate_text


class SourceDoor(Door):
    """Files that are converted twice, with other bytes in the memory that was given back; both results are the same."""

    suffix = ""
    options: tuple[tuple[str, ...], ...] = ((),)

    def prepare(self, folder: Path) -> None:
        """Import what converts, and make sound files."""
        warm_data_commands()
        self.warm()
        self.seeds = self.make_seeds()

    def warm(self) -> None:
        """Import what this kind of file needs."""

    def make_seeds(self) -> dict[str, bytes]:
        """Return sound files by name."""
        raise NotImplementedError

    def change(self, name: str, data: bytes, draw: random.Random) -> bytes:
        """Return a changed file."""
        return mutate(data, draw)

    def place(self, name: str) -> str:
        """Return where a case has the file."""
        return f"data{self.suffix}"

    def make(self, draw: random.Random) -> Case:
        """Return a changed file and how it is converted."""
        seed = draw.choice(list(self.seeds))
        place, origin = self.place(seed), self.seeds[seed]
        files = {place: self.change(seed, origin, draw)}
        source = place.partition("/")[0] if "/" in place else place
        arguments = ("data", "convert", source, *draw.choice(self.options), "-o")
        commands = ((*arguments, "out.h5"), (*arguments, "again.h5"))
        return Case(files, commands, {place: origin}, seed, {"place": place})

    def attempt(self, case: Case, told: Told) -> Verdict:
        """Convert twice and compare; then compare with the judge, where there is one."""
        verdict = Verdict("ok")
        for number, arguments in enumerate(case.commands):
            fill_heap(number)
            told(arguments[-1])
            verdict = judge_command(run_command(arguments), case)
            if verdict.kind != "ok":
                return verdict
        one, other = Path("out.h5").read_bytes(), Path("again.h5").read_bytes()
        if one != other:
            return Verdict("unstable", "two conversions differ")
        if HEAP in one:
            return Verdict("leak", "memory in the result")
        told("judge")
        wrong = self.judge(case)
        return Verdict("wrong", wrong) if wrong else Verdict("ok")

    def judge(self, case: Case) -> str:
        """Return how the result is wrong; "" where it is right, or nobody knows."""
        return ""


class CsvDoor(SourceDoor):
    """Tables as text."""

    name, suffix = "csv", ".csv"
    packages = ("numpy", "pyarrow")
    options = ((), (), ("--no-header",), ("--delimiter", ";"), ("--narrow-integers",), ("--keep-float64",),
               ("--text", "b"),
               ("--shuffle",))  # fmt: skip

    def warm(self) -> None:
        """Import what reads tables."""
        import kerasmem.datatools.converting.sources.table_files
        import kerasmem.datatools.converting.sources.tables  # noqa: F401

    def make_seeds(self) -> dict[str, bytes]:
        """Return tables of numbers, texts, dates and gaps."""
        rows = "\n".join(f"{n},{n / 8},{'cat' if n % 2 else 'dog'},{n % 3}" for n in range(40))
        german = "\n".join(f"{n};{n},5;x{n % 3}" for n in range(20))
        quoted = "\n".join(f'"a ""b"" {n % 2}",{n},"line\nbreak",2020-01-0{n % 9 + 1}' for n in range(10))
        gaps = "\n".join(f"{n if n % 4 else ''},{'' if n % 3 else n},{n * 1e30},00{n}" for n in range(20))
        return {
            "plain": f"a,b,c,d\n{rows}\n".encode(), "german": f"a;b;c\n{german}\n".encode(),
            "quoted": f"a,b,c,d\n{quoted}\n".encode(), "gaps": f"a,b,c,d\n{gaps}".encode(),
            "windows": b"\xef\xbb\xbfa,b\r\n" + b"1,true\r\n2,false\r\n" * 9, "numbers": b"1,2\n3,4\n" * 10,
            "wide": ",".join(f"c{n}" for n in range(300)).encode() + b"\n" + b"1," * 299 + b"1\n",
            "large": b"a,b\n" + b"18446744073709551615,-9223372036854775808\n" * 5,
        }  # fmt: skip

    def change(self, name: str, data: bytes, draw: random.Random) -> bytes:
        """Return changed text."""
        words = (b",", b";", b'"', b"\n", b"\r\n", b"NaN", b"inf", b"-", b"1e400", b"0x10", b"1_000", b"\t", b"=1+1",
                   b"\\",
                 b'""', b"#", b"999999999999999999999999", b"true", b"null", b"1.5.5",
                 "é".encode("latin-1"))  # fmt: skip
        return mutate_text(data, draw, words)

    def judge(self, case: Case) -> str:
        """Compare columns of numbers with what Python's csv module and float() make of them."""
        import h5py

        if len(case.commands[0]) > 5 or b"\0" in case.files["data.csv"]:
            return ""  # other settings
        text = case.files["data.csv"].decode("utf-8-sig")
        header, *rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
        with h5py.File("out.h5") as file:
            for number, name in enumerate(header):
                if header.count(name) > 1 or name not in file or not isinstance(file[name], h5py.Dataset):
                    continue
                values = file[name][()]
                if len(values) != len(rows):
                    return f"{len(values)} rows in place of {len(rows)}"
                if values.dtype.kind == "f" and values.ndim == 1:
                    try:
                        wanted = np.array([float(row[number] or "nan") for row in rows])
                    except ValueError:
                        continue
                    if not np.allclose(values, wanted.astype(values.dtype), rtol=1e-6, equal_nan=True):
                        return "other numbers than float() makes of them"
        return ""


class NpzDoor(SourceDoor):
    """NumPy's files, alone and in archives."""

    name, suffix = "npz", ".npz"
    packages = ("numpy",)
    options = ((), (), ("--keep-float64",), ("--shuffle",), ("--narrow-integers",))

    def warm(self) -> None:
        """Import what reads arrays."""
        import kerasmem.datatools.converting.sources.arrays  # noqa: F401

    def make_seeds(self) -> dict[str, bytes]:
        """Return archives and single arrays of several types and orders."""
        x, y = (np.arange(60) % 7).astype("f4").reshape(20, 3), np.arange(20) % 4
        arrays = {"x": x, "y": y}
        pickled = np.array([{"a": 1}] * 20, dtype=object)
        return {
            "stored.npz": _saved(lambda to: np.savez(to, **arrays)),
            "packed.npz": _saved(lambda to: np.savez_compressed(to, x=x.astype("f8"), y=y.astype(">i2"))),
            "fortran.npz": _saved(lambda to: np.savez(to, x=np.asfortranarray(x), y=y)),
            "scalar.npz": _saved(lambda to: np.savez(to, x=x, n=np.float32(3))),
            "pickle.npz": _saved(lambda to: np.savez(to, x=x, p=pickled)),
            "x.npy": _saved(lambda to: np.save(to, x)), "fortran.npy": _saved(lambda to: np.save(to, x[:, ::-1].T)),
            "version2.npy": _saved(lambda to: np.lib.format.write_array(to, y, version=(2, 0))),
        }  # fmt: skip

    def change(self, name: str, data: bytes, draw: random.Random) -> bytes:
        """Return an archive changed inside, with right checksums, or as it lies there."""
        if name.endswith(".npy"):
            return _with_header(data, draw) if draw.random() < 0.5 else mutate(data, draw, [(0, 128)])
        if draw.random() < 0.4:
            return mutate(data, draw, [(0, 180), (max(0, len(data) - 200), len(data))])
        return rezipped(data, draw, lambda inner: _with_header(inner, draw) if draw.random() < 0.6
                        else mutate(inner, draw, [(0, 128)]))  # fmt: skip

    def place(self, name: str) -> str:
        """Return a name with the seed's suffix."""
        return f"data{name[-4:]}"

    def judge(self, case: Case) -> str:
        """Compare with what NumPy reads."""
        import h5py

        place = str(case.options["place"])
        if len(case.commands[0]) > 5:
            return ""
        try:
            loaded = np.load(place, allow_pickle=False)
            arrays = {"data": loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in loaded.files}
        except Exception as error:
            return f"NumPy does not read it: {type(error).__name__}: {error}"
        with h5py.File("out.h5") as file:
            for name, values in arrays.items():
                if name not in file:
                    continue
                ours = file[name][()]
                if ours.shape != values.shape or not np.array_equal(
                    ours, values.astype(ours.dtype), equal_nan=ours.dtype.kind == "f"
                ):
                    return "other values than NumPy reads"
        return ""


def _saved(save: Callable[[io.BytesIO], None]) -> bytes:
    memory = io.BytesIO()
    save(memory)
    return memory.getvalue()


def _with_header(data: bytes, draw: random.Random) -> bytes:
    """Return an .npy with another header, a sound one of its length."""
    size = struct.unpack("<H", data[8:10])[0]
    header = data[10 : 10 + size]
    descr = draw.choice((b"'|O'", b"'<f4'", b"'<f8'", b"'|S5'", b"'<U3'", b"'>i8'", b"[('a', '<f4'), ('b', '|O')]",
                         b"'|V8'", b"('<f4', (2,))", b"'<M8[s]'", b"'<c8'", b"'|b1'", b"1/0"))  # fmt: skip
    shape = draw.choice((b"(20, 3)", b"()", b"(0,)", b"(-1,)", b"(9999999999,)", b"(2**40,)",
               b"(18446744073709551615,)",
                         b"(20, 0)", b"(1,) * 40", b"(4294967296, 4294967296)", b"(20.0,)", b"(True,)"))  # fmt: skip
    new = draw.choice((
        b"{'descr': " + descr + b", 'fortran_order': False, 'shape': (20, 3), }",
        b"{'descr': '<f4', 'fortran_order': True, 'shape': " + shape + b", }",
        b"{'descr': " + descr + b", 'fortran_order': False, 'shape': " + shape + b"}",
        b"__import__('os').system('touch OWNED')", b"(" * 5000, mutate_text(header, draw),
    ))  # fmt: skip
    new = new.ljust((len(new) + 10) // 64 * 64 + 54) + b"\n"
    return data[:8] + struct.pack("<H", len(new) % 65536) + new + data[10 + size :]


def rezipped(data: bytes, draw: random.Random, change: Callable[[bytes], bytes]) -> bytes:
    """Return an archive one of whose members is changed, or named or packed in another way."""
    memory = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(memory, "w") as new:
        names = old.namelist()
        chosen = draw.choice(names)
        for name in names:
            inner = old.read(name)
            if name == chosen:
                inner = change(inner)
                if draw.random() < 0.1:
                    name = draw.choice(("../out.npy", "/tmp/x.npy", "x", "a/b.npy", "y.npy", "\x1b[31m.npy", "x" * 300))
            packing = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
            if draw.random() < 0.02:
                inner += bytes(100 << 20)
                packing = zipfile.ZIP_DEFLATED
            new.writestr(name, inner, packing if draw.random() < 0.2 or len(inner) > 1 << 20 else zipfile.ZIP_STORED)
    return mutate(memory.getvalue(), draw) if draw.random() < 0.05 else memory.getvalue()


class ParquetDoor(SourceDoor):
    """Parquet files."""

    name, suffix = "parquet", ".parquet"
    packages = ("pyarrow",)
    options = ((), (), ("--keep-float64",), ("--shuffle",))

    def warm(self) -> None:
        """Import what reads tables, with one thread."""
        import pyarrow as pa
        import pyarrow.parquet

        import kerasmem.datatools.converting.sources.table_files
        import kerasmem.datatools.converting.sources.tables  # noqa: F401

        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)

    def make_seeds(self) -> dict[str, bytes]:
        """Return tables of several types, encodings and codecs; made in another process, for pyarrow starts threads."""
        return made_elsewhere(_parquet_files)

    def change(self, name: str, data: bytes, draw: random.Random) -> bytes:
        """Return a changed file, most often in its pages' headers or in the footer."""
        footer = struct.unpack("<I", data[-8:-4])[0] + 8
        return mutate(data, draw, [(len(data) - footer, len(data)), (0, 200), (0, len(data))])


def _parquet_files() -> dict[str, bytes]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.table({
        "a": list(range(50)), "b": [n / 8 for n in range(50)], "c": ["cat" if n % 2 else "dog" for n in range(50)],
        "d": [n % 5 == 0 for n in range(50)], "e": [None if n % 7 == 0 else n for n in range(50)],
        "f": [[n, n + 1] for n in range(50)],
    })  # fmt: skip
    vectors = pa.table({"v": pa.array([[1.0, 2.0]] * 20, pa.list_(pa.float32(), 2)), "y": list(range(20))})
    found = {}
    for codec in ("none", "snappy", "gzip", "zstd", "brotli", "lz4"):
        for dictionary in (True, False):
            memory = io.BytesIO()
            parquet.write_table(table, memory, compression=codec, use_dictionary=dictionary, row_group_size=20)
            found[f"{codec} {dictionary}"] = memory.getvalue()
    for name, options in {"vectors": {}, "version 2": {"data_page_version": "2.0"}}.items():
        memory = io.BytesIO()
        parquet.write_table(vectors if name == "vectors" else table, memory, **options)
        found[name] = memory.getvalue()
    return found


class ImagesDoor(SourceDoor):
    """Folders of images."""

    name = "images"
    packages = ("pillow", "numpy")
    options = ((), (), ("--image-size", "8x8"), ("--color", "gray"), ("--color", "rgba", "--accept-mislabelled"),
               ("--accept-mislabelled", "--image-size", "5x7"))  # fmt: skip

    def warm(self) -> None:
        """Import all that opens images."""
        from PIL import Image

        import kerasmem.datatools.converting.sources.images  # noqa: F401

        Image.init()

    def make_seeds(self) -> dict[str, bytes]:
        """Return small images of all kinds that are taken, and some that are not."""
        from PIL import Image

        colours = (np.arange(12 * 10 * 3) * 5 % 256).astype("u1").reshape(12, 10, 3)
        plain = Image.fromarray(colours)
        found = {}
        for kind in ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm", "tga", "ico", "pcx", "jpeg2000", "dds", "sgi"):
            memory = io.BytesIO()
            try:
                plain.save(memory, kind)
            except (OSError, KeyError, ValueError):
                continue
            found[f"x.{'jpg' if kind == 'jpeg' else kind}"] = memory.getvalue()
        others = {"gray.png": plain.convert("L"), "alpha.png": plain.convert("RGBA"), "palette.png": plain.convert("P"),
                  "bit.png": plain.convert("1"), "deep.png": Image.fromarray(colours[..., 0].astype("u2") * 255),
                  "alpha.webp": plain.convert("RGBA"), "cmyk.jpg": plain.convert("CMYK")}  # fmt: skip
        for name, image in others.items():
            memory = io.BytesIO()
            image.save(memory, {"jpg": "jpeg"}.get(name[-3:], name.rpartition(".")[2]))
            found[name] = memory.getvalue()
        memory = io.BytesIO()
        plain.save(memory, "gif", save_all=True, append_images=[plain.rotate(90), plain.rotate(180)])
        found["frames.gif"] = memory.getvalue()
        memory = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        plain.save(memory, "jpeg", exif=exif, icc_profile=b"\0" * 200)
        found["turned.jpg"] = memory.getvalue()
        return found

    def place(self, name: str) -> str:
        """Return a place in a class folder."""
        return f"photos/cat/{name}"

    def make(self, draw: random.Random) -> Case:
        """Return a folder with a changed image, a sound one beside it, now and then under another's name."""
        case = super().make(draw)
        (place,) = case.files
        name = place.rpartition("/")[2]
        if draw.random() < 0.05:
            name = draw.choice(
                ("x.svg", "x.png", ".hidden.png", "x.PNG", "\x1b[31mx.png", "<b>.png", "x", "x.npy", "x.eps")
            )
        files = {f"photos/cat/{name}": case.files[place], "photos/dog/sound.png": self.seeds["x.png"]}
        origin = {f"photos/cat/{name}": self.seeds[case.note]}
        return Case(files, case.commands, origin, case.note)

    def change(self, name: str, data: bytes, draw: random.Random) -> bytes:
        """Return a changed image; a PNG's pieces with right checksums."""
        changed = mutate(data, draw, [(0, 64), (0, len(data))])
        return _with_crcs(changed) if name.endswith(".png") and draw.random() < 0.9 else changed


def _with_crcs(data: bytes) -> bytes:
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        size = int.from_bytes(out[at : at + 4], "big")
        end = at + 8 + size
        if end + 4 > len(out):
            break
        out[end : end + 4] = zlib.crc32(bytes(out[at + 4 : end])).to_bytes(4, "big")
        at = end + 4
    return bytes(out)


class RecordsDoor(SourceDoor):
    """TFRecord files."""

    name, suffix = "tfrecord", ".tfrecord"
    packages = ("tensorflow",)
    memory = 3 << 29
    batch = 60
    options = ((), (), ("--shuffle",), ("--narrow-integers",), ("--image-size", "4x4"))

    def warm(self) -> None:
        """Import TensorFlow, and let it do nothing."""
        import tensorflow as tf

        import kerasmem.datatools.converting.sources.image_decoding
        import kerasmem.datatools.converting.sources.records  # noqa: F401

        tf.io.TFRecordWriter  # noqa: B018  (TensorFlow loads its parts when they are first named)

    def make_seeds(self) -> dict[str, bytes]:
        """Return files of records of numbers, bytes and images."""
        import gzip

        from PIL import Image

        memory = io.BytesIO()
        Image.fromarray((np.arange(48) * 5).astype("u1").reshape(4, 4, 3)).save(memory, "png")
        self.image = memory.getvalue()
        numbers = [_example({"x": [n / 4, n / 2], "y": [n % 3]}) for n in range(12)]
        raw = [_example({"x": bytes(range(n, n + 6)), "name": b"cat", "y": [n]}) for n in range(12)]
        images = [_example({"image": self.image, "label": [n % 2]}) for n in range(4)]
        self.records = {"numbers": numbers, "bytes": raw, "images": images}
        found = {name: b"".join(map(framed, records)) for name, records in self.records.items()}
        return found | {"packed": gzip.compress(found["numbers"], mtime=0)}

    def change(self, name: str, data: bytes, draw: random.Random) -> bytes:
        """Return a file with changed bytes, or with changed records in right frames."""
        if name == "packed" or draw.random() < 0.3:
            return mutate(data, draw)
        records = list(self.records[name])
        which = draw.randrange(len(records))
        records[which] = mutate(records[which], draw)
        return b"".join(map(framed, records))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _example(features: dict[str, bytes | list[float] | list[int]]) -> bytes:
    """Return a tf.train.Example as bytes, by the wire format of protocol buffers."""
    found = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            content = _field(1, _field(1, value))
        elif isinstance(value[0], float):
            content = _field(2, _field(1, b"".join(struct.pack("<f", each) for each in value)))
        else:
            content = _field(3, _field(1, b"".join(_varint(int(each)) for each in value)))
        found += _field(1, _field(1, name.encode()) + _field(2, content))
    return _field(1, found)


_CRC = [0] * 256
for _number in range(256):
    _value = _number
    for _ in range(8):
        _value = _value >> 1 ^ (0x82F63B78 if _value & 1 else 0)
    _CRC[_number] = _value


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(record: bytes) -> bytes:
    """Return a record with its length and the checksums of both, as TFRecord files have them."""
    length = struct.pack("<Q", len(record))
    return length + _masked_crc(length) + record + _masked_crc(record)


def made_elsewhere(make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    """Return what a function makes in a forked process, whose threads and memory end with it."""
    import os
    import pickle

    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(make(), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        made: dict[str, bytes] = pickle.load(pipe)
    os.waitpid(pid, 0)
    return made


DOORS = (CsvDoor, NpzDoor, ParquetDoor, ImagesDoor, RecordsDoor)
