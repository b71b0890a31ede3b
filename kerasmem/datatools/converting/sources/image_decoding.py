"""One image as an array: of the size and channels asked for, upright, and only if it is what it says it is."""

from __future__ import annotations

import io
import os
import warnings
from typing import Any

import numpy as np

from kerasmem.datatools.converting.settings import ReadOptions
from kerasmem.errors import DataError, MissingExtraError
from kerasmem.hdf5.layout import one_line

FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "BMP": (".bmp", ".dib"),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm"),
}
"""What is decoded; nothing else that Pillow knows is tried (some of it starts other programs)."""

SUFFIXES = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}
_MODES = {"rgb": ("RGB", 3), "rgba": ("RGBA", 4), "gray": ("L", 1)}
_MOST_PIXELS = 1 << 27  # of one image; more is taken for a decompression bomb
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N", "I")


def load_pillow() -> Any:
    """Return PIL.Image.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("reading images", "convert") from None
    return Image


def decode_image(
    source: str | bytes,
    where: str,
    options: ReadOptions,
    suffix: str = "",
    shape: tuple[int, ...] | None = None,
    first: str = "the first",
) -> np.ndarray:
    """Return an image as uint8, (height, width, channels).

    Orientation noted by a camera is applied; of several frames the first is taken; transparency is dropped unless
    `color` is "rgba"; 16-bit values keep their upper 8.

    Args:
        source: path of the file, or its content.
        where: its name, for messages.
        options: what is wanted.
        suffix: the end of its name, which has to agree with its content.
        shape: what it has to have, that of the first image; None for any.
        first: what messages call that one.

    Raises:
        DataError: it is no image, cut off, too large, of another shape, or not what its name says.
    """
    pillow = load_pillow()
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pillow.open(
                source if isinstance(source, str) else io.BytesIO(source), formats=tuple(FORMATS)
            ) as image:
                expected = SUFFIXES.get(suffix.lower())
                if expected is not None and image.format != expected and not options.accept_mislabelled:
                    raise DataError(
                        f"{where}: its name says {expected}, and its content is {image.format}; rename it, or accept "
                        "such with accept_mislabelled=True (--accept-mislabelled)"
                    )
                if image.width * image.height > _MOST_PIXELS:
                    raise DataError(_too_many(where, f"{image.width:,} × {image.height:,} pixels"))
                array = _array(ImageOps, pillow, image, where, options)
    except UnidentifiedImageError:
        raise DataError(f"{where}: is no image in a format that is read ({', '.join(FORMATS)}); leave it out") from None
    except DataError:
        raise
    except pillow.DecompressionBombError:
        raise DataError(_too_many(where, "far more pixels than a picture has")) from None
    except MemoryError:
        raise DataError(f"{where}: does not fit in memory once unpacked") from None
    except Exception as error:  # Pillow raises whatever its decoders meet in damaged files
        reason = one_line(str(error), 200) or type(error).__name__
        raise DataError(f"{where}: the image is cut off or damaged: {reason}; mend it or leave it out") from error
    if shape is not None and array.shape != shape:
        raise DataError(
            f"{where}: has {array.shape[1]:,} × {array.shape[0]:,} pixels, and {first} has {shape[1]:,} × "
            f"{shape[0]:,}; images of different sizes need image_size (--image-size 224x224)"
        )
    return array


def _too_many(where: str, what: str) -> str:
    return (
        f"{where}: has {what}, and {_MOST_PIXELS:,} are allowed: a small file that unpacks to so much is an attack "
        "more often than a picture; leave it out"
    )


def _array(ops: Any, pillow: Any, image: Any, where: str, options: ReadOptions) -> np.ndarray:
    mode, channels = _MODES[options.color]
    upright = ops.exif_transpose(image)
    if upright.mode in _SIXTEEN_BITS:
        values = np.asarray(upright)
        if values.min() < 0 or values.max() > 65535:
            raise DataError(f"{where}: has values beyond 16 bits; convert it first")
        upright = pillow.fromarray((values >> 8).astype(np.uint8))
    elif upright.mode == "F":
        raise DataError(f"{where}: holds floating-point values, no colours; save it as .npy")
    if upright.mode != mode:
        if upright.mode in ("P", "PA") and mode != "RGBA":
            upright = upright.convert("RGBA")
        upright = upright.convert(mode)
    if options.image_size is not None and upright.size != options.image_size:
        upright = upright.resize(options.image_size, pillow.Resampling.BILINEAR)
    array = np.asarray(upright, np.uint8)
    return array.reshape(array.shape[0], array.shape[1], channels)


def is_encoded_image(data: bytes) -> bool:
    """Return whether bytes begin as an image file does."""
    starts = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
    return data.startswith(starts) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def suffix_of(path: str) -> str:
    """Return the end of a file's name, in small letters."""
    return os.path.splitext(path)[1].lower()
