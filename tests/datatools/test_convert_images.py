"""`kerasmem.data.convert` from folders of images keeps pixels, rotates by EXIF, and reads only images."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
from converted import content, left_in, streamed

from kerasmem.data import convert
from kerasmem.errors import DataError

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)


def picture(width=20, height=12, channels=3):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return RNG.integers(0, 256, shape, "u1")


@pytest.fixture
def folder(tmp_path):
    """Write two classes of PNG files, and return their pixels."""
    root = tmp_path / "photos"
    pixels = []
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(25):
            array = picture()
            pixels.append(array)
            Image.fromarray(array).save(root / name / f"{number:03}.png")
    return root, np.stack(pixels)


def save(root, name, image, **options):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def test_one_folder_per_class(tmp_path, folder):
    import h5py

    root, pixels = folder
    (root / ".DS_Store").write_bytes(b"x")
    (root / "cat" / "Thumbs.db").write_bytes(b"x")
    os.mkfifo(root / "dog" / "pipe.png")
    (root / "cat" / ".hidden.png").write_bytes(b"x")
    output = tmp_path / "out.h5"
    done = convert(root, output)
    x, y = streamed(output)
    assert x.dtype == np.uint8 and np.array_equal(x, pixels) and y.tolist() == [0] * 25 + [1] * 25
    with h5py.File(output) as file:
        assert list(file["y"].attrs["class_names"]) == ["cat", "dog"]
    assert (
        done.line.endswith("scale=1 / 255)") and "2 files and folders that are not images are skipped" in done.notes[0]
    )
    assert left_in(tmp_path, output, root) == []


def test_images_are_resized_and_upright(tmp_path):
    root = tmp_path / "photos"
    wide, tall = picture(40, 20), picture(10, 30)
    save(root, "a/1.png", Image.fromarray(wide))
    save(root, "a/2.png", Image.fromarray(tall))
    turned = Image.Exif()
    turned[0x0112] = 6  # turn by 90 degrees
    save(root, "b/3.png", Image.fromarray(wide), exif=turned)
    with pytest.raises(DataError, match=r"a/2.png'?: must have 40 × 20 pixels as the first; got 10 × 30.*--image-size"):
        convert(root, tmp_path / "out.h5")
    convert(root, tmp_path / "out.h5", image_size="16x8")
    result = content(tmp_path / "out.h5")["x"]
    assert result.shape == (3, 8, 16, 3)
    for row, array in enumerate((wide, tall, np.rot90(wide, -1))):
        expected = Image.fromarray(np.ascontiguousarray(array)).resize((16, 8), Image.Resampling.BILINEAR)
        assert np.array_equal(result[row], np.asarray(expected))


def encoded(kind, **options):
    buffer = io.BytesIO()
    Image.fromarray(picture()).save(buffer, kind, **options)
    return buffer.getvalue()


HOSTILE = {
    "text.jpg": (lambda: b"<html>not found</html>", "cannot be read as an image"),
    "script.png": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage", "cannot be read as an image"),
    "cut.jpg": (lambda: encoded("JPEG")[:300], "cannot be read as an image"),
    "cut.png": (lambda: encoded("PNG")[:-200], "cannot be read as an image"),
    "empty.png": (lambda: b"", "cannot be read as an image"),
    "noise.png": (lambda: encoded("PNG")[:40] + RNG.bytes(400), "cannot be read as an image"),
    "float.tiff": (lambda: _float(), "more than 8 bits per channel"),
}


def _float():
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((12, 20), "f4")).save(buffer, "TIFF")
    return buffer.getvalue()


@pytest.mark.parametrize("name", list(HOSTILE))
@pytest.mark.parametrize("first", [True, False])
def test_hostile_images(tmp_path, folder, name, first):
    root, _ = folder
    make, message = HOSTILE[name]
    (root / "cat" / (f"0 {name}" if first else f"x {name}")).write_bytes(make())
    with pytest.raises(DataError, match=rf"{name}'?: .*{message}"):
        convert(root, tmp_path / "out.h5", shuffle=True)
    assert left_in(tmp_path, root) == []


def test_strange_file_names(tmp_path):
    import h5py

    root = tmp_path / "photos"
    names = ["new\nline", "\x1b[31mred", "..sneaky", "ünïcode", "bad" + os.fsdecode(b"\xff\xfe"), "a" * 200]
    for name in names:
        os.makedirs(os.path.join(root, name))
        Image.fromarray(picture()).save(os.path.join(root, name, name[:20] + ".png"))
    convert(root, tmp_path / "out.h5")
    kept = sorted((name for name in names if not name.startswith(".")), key=os.fsencode)
    with h5py.File(tmp_path / "out.h5") as file:
        result = list(file["y"].attrs["class_names"])
        assert len(file["x"]) == len(kept) and len(result) == len(kept)
    assert "bad\\xff\\xfe" in result and "ünïcode" in result
    bad = os.path.join(root, "new\nline", "evil\n\x1b[2J.png")
    with open(bad, "wb") as file:
        file.write(b"no image")
    with pytest.raises(DataError) as error:
        convert(root, tmp_path / "o2.h5")
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


def test_links_are_refused(tmp_path, folder):
    root, _ = folder
    for name in ("dog/zz.png", "zebra"):
        os.symlink(root / "cat", root / name)
        with pytest.raises(DataError, match=f"{name}'?: is a symbolic link"):
            convert(root, tmp_path / "out.h5")
        os.unlink(root / name)


def test_other_images_become_8_bits_per_channel(tmp_path):
    root = tmp_path / "photos"
    opaque = picture()
    save(root, "a/1.png", Image.fromarray(np.dstack([opaque, np.arange(240, dtype="u1").reshape(12, 20)])))
    frames = [Image.fromarray(picture()) for _ in range(3)]
    save(root, "b/2.gif", frames[0], save_all=True, append_images=frames[1:])
    grey = picture(channels=1)
    save(root, "b/3.png", Image.fromarray(grey))
    convert(root, tmp_path / "out.h5")
    result = content(tmp_path / "out.h5")["x"]
    assert np.array_equal(result[0], opaque) and np.array_equal(result[2], np.dstack([grey] * 3))
    convert(root, tmp_path / "gray.h5", color="gray", image_size="10x6")
    assert content(tmp_path / "gray.h5")["x"].shape == (3, 6, 10, 1)
    save(root, "a/0.png", Image.fromarray(RNG.integers(0, 65536, (12, 20)).astype("u2")))
    with pytest.raises(DataError, match=r"0.png'?: .*more than 8 bits per channel; save it as .npy"):
        convert(root, tmp_path / "deep.h5")
