"""Hostile tables, arrays and images: oversized content is refused within little memory."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import zipfile
import zlib

import numpy as np

MIB = 2**20


def npy_header(shape, dtype="|u1"):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def wide_csv(path):
    path.write_text(",".join(f"c{number}" for number in range(300_000)) + "\n" + ",".join("1" * 300_000) + "\n")


def one_line_csv(path):
    with path.open("wb") as file:
        file.write(b"a,b\n")
        file.truncate(2**30)


def packed_csv(path):
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 1, raw) as file:
        for _ in range(64):
            file.write(bytes(MIB))


def open_quote(path):
    path.write_text('a,b\n1,"' + "x\n" * 20_000)


def packed_npz(path):
    """A header that claims 200 MiB of zeros, of which the archive holds 10 MiB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", npy_header((2**20, 200)) + bytes(10 * MIB))


def many_names_npz(path):
    data = npy_header((MIB,)) + bytes(MIB)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x0.npy", data)
        first = archive.getinfo("x0.npy")
        for number in range(1, 3000):
            again = zipfile.ZipInfo(f"x{number}.npy")
            for name in ("header_offset", "CRC", "compress_size", "file_size", "compress_type"):
                setattr(again, name, getattr(first, name))
            archive.filelist.append(again)


def parquet_footer(path):
    path.write_bytes(b"PAR1" + bytes(64) + struct.pack("<I", 2**31 - 1) + b"PAR1")


FILES = {
    "wide.csv": (wide_csv, "has 300,000 columns; 65,536 are allowed"),
    "line.csv": (one_line_csv, "a row is longer than 4,194,304 bytes|cannot be read"),
    "packed.csv.gz": (packed_csv, "a row is longer than 4,194,304 bytes|cannot be read"),
    "quote.csv": (open_quote, "a text of several lines; a quote may not be closed"),
    "packed.npz": (packed_npz, "is cut off or damaged"),
    "names.npz": (many_names_npz, "File name in directory 'x1.npy' and header b'x0.npy' differ"),
    "footer.parquet": (parquet_footer, "cannot be read"),
}


CONVERT = """
import json, os, sys
import kerasmem
from kerasmem.errors import DataError
told = {}
for source in sys.argv[1:]:
    try:
        kerasmem.data.convert(source, os.path.basename(source) + ".out.h5")
    except DataError as error:
        told[os.path.basename(source)] = str(error)
print(json.dumps([told, os.listdir()]))
"""


def converted(attack, paths, memory):
    done = attack(*paths, script=CONVERT, seconds=100, memory=memory)
    told, left = json.loads(done.out)
    assert not [name for name in left if name.endswith(".part")]
    assert not [name for name in told if f"{name}.out.h5" in left]
    return told


def test_oversized_tables_and_arrays_are_refused(attack, tmp_path):
    for name, (make, _) in FILES.items():
        make(tmp_path / name)
    told = converted(attack, [tmp_path / name for name in FILES], 300 * MIB)
    for name, (_, message) in FILES.items():
        assert re.search(message, told.get(name, "")), (name, told.get(name))


def png(width, height, depth, colour, data):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def tiff(width, height):
    entries = [(256, 4, width), (257, 4, height), (258, 3, 16), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1),
               (278, 4, height), (279, 4, width * height * 2 & 0xFFFFFFFF)]  # fmt: skip
    table = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries)) + table + bytes(4)


def endless_pages():
    """A TIFF with a circular list of pages."""
    good = tiff(4, 4)
    return good[:-4] + struct.pack("<I", 8) + bytes(64)


IMAGES = {
    "wide.png": (lambda: png(60_000, 60_000, 16, 0, bytes(100)), "exceeds limit of 178956970 pixels"),
    "deep.png": (lambda: png(11_000, 11_000, 16, 6, bytes(100)), "11,000 × 11,000 pixels"),
    "thin.png": (lambda: png(10, 8_388_620, 16, 0, bytes(4200)), "10 × 8,388,620 pixels"),
    "many.png": (lambda: png(10_000, 13_000, 8, 3, bytes(10_001 * 13_000)), "10,000 × 13,000 pixels"),
    "wide.tif": (lambda: tiff(2**31, 2**31), "pixels|damaged|no image"),
    "round.tif": (endless_pages, ""),
    "frames.gif": (lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x2c" * 4000, "pixels|damaged"),
}


def test_oversized_images_are_refused(attack, tmp_path):
    for name, (make, _) in IMAGES.items():
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a" / name).write_bytes(make())
    told = converted(attack, [tmp_path / name for name in IMAGES], 1200 * MIB)
    for name, (_, message) in IMAGES.items():
        assert re.search(message, told.get(name, "")), (name, told.get(name))
