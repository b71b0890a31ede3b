"""Configurations in model files, read as data without running code."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerasmem.errors import ModelFileError, UsageError, first_line
from kerasmem.units import MIB, format_size

# A configuration of 20,000 layers takes some 20 MiB. More is a mistake or an attack.
MAX_CONFIG_BYTES = 64 * MIB

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Errors of h5py and zipfile for damaged files.
_DAMAGES = (OSError, RuntimeError, KeyError, ValueError, TypeError, EOFError, zlib.error, zipfile.BadZipFile)
_FACTORY = "--factory package.module:function (a function that returns the model)"


@dataclass(frozen=True)
class ModelDocument:
    """The configuration in a model file.

    Attributes:
        path: the file.
        config: the model's configuration in the file's format.
        training: the configuration of `compile` (optimizer, loss), if any.
        keras_version: the version that wrote the file, if known.
    """

    path: Path
    config: dict[str, Any]
    training: dict[str, Any] | None = None
    keras_version: str | None = None


def check_model_name(text: str) -> None:
    """Refuse a name that cannot be a model. It is fast, because it does not import Keras.

    Raises:
        ModelFileError: If the file does not exist.
        UsageError: If the Python file does not exist.
    """
    if is_factory_name(text):
        check_factory_name(text, "model")
    elif "://" in text:
        raise ModelFileError(f"{text}: a model must be a local file; download it")
    elif not text:
        raise ModelFileError("the model must be a path or package.module:function; got an empty text")
    elif "\0" not in text and not os.path.lexists(text):
        hint = "; write Keras's own models as keras.applications:ResNet50" if text.isidentifier() else ""
        raise ModelFileError(f"{text}: the file does not exist{hint}")


def check_factory_name(text: str, option: str) -> None:
    """Refuse a name that cannot be a function, without running code.

    Raises:
        UsageError: If the name has another form, or the Python file does not exist.
    """
    module, _, function = text.rpartition(":")
    if not module or not function.isidentifier():
        raise UsageError(f"{option} must be package.module:function or file.py:function; got {text!r}")
    if module.endswith(".py") and not Path(module).exists():
        raise UsageError(f"{option} {module}: the file does not exist")


def is_factory_name(text: str) -> bool:
    """Return whether a text is "package.module:function" or "file.py:function", and not an existing file."""
    module, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier() or Path(text).exists():
        return False
    return module.endswith(".py") or all(part.isidentifier() for part in module.split("."))


def read_document(path: str | os.PathLike[str]) -> ModelDocument:
    """Read the configuration of a `.h5`, `.keras` or JSON file. The format is detected from its content.

    Raises:
        ModelFileError: If the file is missing, damaged, too large, or not a Keras model.
    """
    check_model_name(os.fspath(path))
    path = Path(path)
    head = _read_head(path)
    if head.startswith(_HDF5_SIGNATURE):
        kind, read = "HDF5 file", _read_h5
    elif head.startswith(b"PK"):
        kind, read = ".keras archive", _read_keras_archive
    elif head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        kind, read = "JSON file", _read_json
    elif path.suffix == ".py":
        raise ModelFileError(f"{path}: name the function that returns the model, as in {path}:build_model")
    else:
        raise ModelFileError(
            f"{path}: not a Keras model (.h5, .keras or architecture .json), or damaged. If it is a checkpoint, a "
            f"pickle or a TensorFlow Lite model, pass the code that builds the model: {_FACTORY}"
        )
    try:
        return read(path)
    except ModelFileError:
        raise
    except _DAMAGES as error:
        raise ModelFileError(
            f"{path}: the {kind} is damaged or cut short ({first_line(error)}); copy or save it again"
        ) from error


def _read_head(path: Path) -> bytes:
    try:
        if (path / "saved_model.pb").exists():
            raise ModelFileError(
                f"{path}: a SavedModel folder has a traced graph and no layers. Save the model as a file "
                f"(model.save('model.keras')), or pass the code that builds it: {_FACTORY}"
            )
        if path.exists() and not path.is_file():  # reading a pipe would block
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise ModelFileError(f"{path}: is {kind}; a model must be a .h5, .keras or .json file")
        if path.stat().st_size == 0:  # also endless files of the kernel
            raise ModelFileError(f"{path}: the file is empty")
        with path.open("rb") as file:
            return file.read(4096)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read ({first_line(error)})") from error


def _read_h5(path: Path) -> ModelDocument:
    import h5py

    with _RecordedFile(path) as reads, h5py.File(reads, "r") as file:
        text = _attribute(file, "model_config", reads)
        if text is None:
            raise ModelFileError(
                f"{path}: an HDF5 file without an architecture (no attribute model_config), as model.save_weights "
                f"writes it. Save the whole model (model.save('model.keras')), or pass the code that builds it: "
                f"{_FACTORY}"
            )
        training = _attribute(file, "training_config", reads)
        version = _attribute(file, "keras_version", reads)
    config = _parse(text, path, "model_config")
    compiled = _parse(training, path, "training_config") if training else None
    return ModelDocument(path, config, compiled, version)


class _RecordedFile(io.FileIO):
    """A file that records the bytes that HDF5 reads: metadata and attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self.bytes_read = bytearray()

    def readinto(self, buffer: Any) -> int | None:
        """Read into a buffer and record the bytes."""
        count = super().readinto(buffer)
        self.bytes_read += memoryview(buffer)[:count]
        return count


def _attribute(file: Any, name: str, reads: _RecordedFile) -> str | None:
    if name not in file.attrs:
        return None
    path = reads.path
    attribute = file.attrs.get_id(name)
    if attribute.dtype.hasobject and _declared_length(name, reads) > MAX_CONFIG_BYTES:
        raise _too_large(path, name)
    value = file.attrs[name] if attribute.shape == () else None  # an array may repeat one large text
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise ModelFileError(f"{path}: {name} must be one text in a Keras model")
    return value


def _declared_length(name: str, reads: _RecordedFile) -> int:
    """Return the length that the file declares for a text of variable length.

    HDF5 allocates the declared bytes before it reads the text, up to 4 GiB in a damaged file. h5py does not provide the
    length, but HDF5 has just read the attribute's message: version, sizes, name, type, shape, length.

    Raises:
        ModelFileError: If the message is missing.
    """
    text = name.encode() + b"\0"
    lengths = []
    for match in re.finditer(re.escape(text), reads.bytes_read):
        for version, header in ((1, 8), (2, 8), (3, 9)):
            begin = match.start() - header
            if begin < 0 or reads.bytes_read[begin] != version:
                continue
            sizes = struct.unpack_from("<3H", reads.bytes_read, begin + 2)  # of name, type and shape
            padding = 8 if version == 1 else 1
            offset = match.start() + sum(-(-size // padding) * padding for size in sizes)
            if sizes[0] == len(text) and offset + 4 <= len(reads.bytes_read):
                lengths.append(struct.unpack_from("<I", reads.bytes_read, offset)[0])
    if not lengths:
        raise ModelFileError(f"{reads.path}: {name} is not stored in Keras's format; save the model again")
    return max(lengths)


def _read_keras_archive(path: Path) -> ModelDocument:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        if "config.json" not in names:
            raise ModelFileError(f"{path}: a .keras model must contain config.json")
        config = _member(archive, "config.json")
        metadata = _member(archive, "metadata.json") if "metadata.json" in names else "{}"
    version = _parse(metadata, path, "metadata.json").get("keras_version")
    return _document(path, _parse(config, path, "config.json"), version)


def _document(path: Path, config: dict[str, Any], version: Any) -> ModelDocument:
    training = config.get("compile_config")
    version = version if isinstance(version, str) else None
    return ModelDocument(path, config, training if isinstance(training, dict) else None, version)


def _member(archive: zipfile.ZipFile, name: str) -> str:
    with archive.open(name) as member:  # its declared size may be wrong
        return member.read(MAX_CONFIG_BYTES + 1).decode("utf-8", "replace")


def _read_json(path: Path) -> ModelDocument:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        document = _parse(file.read(MAX_CONFIG_BYTES + 1), path, "the file")
    if "class_name" not in document or "config" not in document:
        raise ModelFileError(
            f"{path}: the JSON of an architecture must have class_name and config; model.to_json() writes one"
        )
    return _document(path, document, document.get("keras_version"))


def _parse(text: str, path: Path, field: str) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise _too_large(path, field)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ModelFileError(f"{path}: {field} is nested too deeply") from None
    except ValueError as error:
        raise ModelFileError(f"{path}: {field} is not valid JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: {field} must be a JSON object; got {type(value).__name__}")
    return value


def _too_large(path: Path, field: str) -> ModelFileError:
    limit = format_size(MAX_CONFIG_BYTES)
    return ModelFileError(f"{path}: {field} must have at most {limit}")
