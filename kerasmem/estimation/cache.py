"""Estimates of model files kept in the user's cache folder, so that the same question is answered at once.

What an estimate depends on is in the key: the architecture and training settings in the file (not its weights), every
setting, the device's row of the catalogue, the versions of Python, Keras, TensorFlow and kerasmem with the state of its
files, this machine's processor, and the environment variables that TensorFlow and XLA read. Models that code builds are
never kept, since the code may change; nor are the formula, which is instant, and probes, which measure.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from kerasmem import files
from kerasmem.devices.catalogue import resolve_device
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.arguments import EstimateArguments
from kerasmem.estimation.facade import Estimated, estimate, estimated
from kerasmem.estimation.report import MemoryReport
from kerasmem.units import MIB

SWITCH = "KERASMEM_CACHE"
CACHED_METHODS = ("auto", "graph", "xla", "gpu-target")
MOST_BYTES, MOST_BYTES_AN_ENTRY = 64 * MIB, 8 * MIB
NOTE = "from the cache of earlier answers (--no-cache computes it again)"

_FORMAT = 1
_OWN_FILES = (".py", ".json", ".txtpb")  # code, and tables
_OFF = ("off", "0", "no", "false")
_VARIABLES = ("TF_", "XLA_", "KERAS_", "JAX_", "CUDA_", "NVIDIA_", "OMP_", "KERASMEM_")
_DEFAULTS = {each.name: each.default for each in fields(EstimateArguments) if each.name != "model"}
_LIBRARIES = ("tensorflow", "keras", "jax", "jaxlib", "numpy")


def cached_estimate(model: Any, **settings: Any) -> MemoryReport:
    """Return `kerasmem.estimate`, or what it said of the same file and settings before.

    Args:
        model: as for `kerasmem.estimate`; only files are cached.
        **settings: the other arguments of `kerasmem.estimate`.

    Raises:
        KerasmemError: as `kerasmem.estimate`; a cache that cannot be read or written is passed over.
    """
    arguments = EstimateArguments(model, **settings)
    return cached(model, settings, lambda: estimated(arguments))


def cached(model: Any, settings: Mapping[str, Any], compute: Callable[[], Estimated]) -> MemoryReport:
    """Return what was computed for a file and settings before, or compute it.

    Args:
        model: as for `kerasmem.estimate`; only files are cached.
        settings: all else that the answer depends on, by name.
        compute: gives the answer.
    """
    folder = cache_folder()
    key = None if folder is None else cache_key(model, settings)
    if folder is None or key is None:
        return compute().report
    try:
        files.refuse_shared("cache", str(folder))
    except UsageError as error:
        report = compute().report
        return replace(report, notes=(*report.notes, f"nothing is kept or read: {error}, or set {SWITCH}=off"))
    kept = read_entry(folder, key)
    if kept is not None:
        facts = replace(kept.model, source=str(Path(model)))
        return replace(kept, model=facts, notes=(*kept.notes, NOTE))
    report, failed = compute()
    if report.settings.method in CACHED_METHODS and not failed:  # what failed may have an answer another time
        write_entry(folder, key, report)
    return report


def estimator(keeps: bool) -> Callable[..., MemoryReport]:
    """Return what estimates: `kerasmem.estimate`, or `cached_estimate` where earlier answers will do."""
    return cached_estimate if keeps else estimate


def cache_folder() -> Path | None:
    """Return the folder for entries, or None where KERASMEM_CACHE=off or the user has no home."""
    if os.environ.get(SWITCH, "").strip().lower() in _OFF and os.environ.get(SWITCH):
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        base = base.expanduser()
    except RuntimeError:
        return None
    return base / "kerasmem" / "estimates" if base.is_absolute() else None


def cache_key(model: Any, settings: Mapping[str, Any]) -> str | None:
    """Return the key of a question, or None where its answer is not kept."""
    from kerasmem.models.document import read_document
    from kerasmem.models.names import is_factory_name

    if not isinstance(model, (str, os.PathLike)) or is_factory_name(os.fspath(model)):
        return None
    if settings.get("method", "auto") not in CACHED_METHODS or any(
        settings.get(name) for name in ("factory", "factory_args", "custom_objects", "trust")
    ):
        return None
    try:
        document = read_document(model)
        device = settings.get("device")
        row = None if device is None else resolve_device(str(device)).to_dict()
        text = json.dumps(
            [
                _FORMAT, {**asdict(document), "path": document.path.name}, row,
                {**_DEFAULTS, **settings}, *_surroundings(),
            ],
            sort_keys=True,
            default=_plain,
        )  # fmt: skip
    except (KerasmemError, TypeError, ValueError, RecursionError):  # the estimate itself will say what is wrong
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_entry(folder: Path, key: str) -> MemoryReport | None:
    """Return the report kept under a key; None where there is none, or where it is damaged."""
    path = _path(folder, key)
    try:
        with open(files.open_plain(str(path)), "rb") as file:
            digest, _, text = file.read(MOST_BYTES_AN_ENTRY + 1).decode("utf-8").partition("\n")
        if digest != _digest(key, text):
            return None
        report = MemoryReport.from_dict(files.read_json(text))
    except (OSError, ValueError, KerasmemError, AttributeError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the least recently used goes first
    return report


def write_entry(folder: Path, key: str, report: MemoryReport) -> None:
    """Keep a report: written under another name first, so that no reader meets half of it; failures are passed over."""
    text = json.dumps(report.to_dict())
    data = f"{_digest(key, text)}\n{text}".encode("utf-8", "surrogatepass")
    if len(data) > MOST_BYTES_AN_ENTRY:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f"new-{os.getpid()}-{threading.get_ident()}"
        with files.replacing(str(_path(folder, key)), temporary=str(new)) as file:
            file.write(data)
        _shrink(folder)


def _shrink(folder: Path) -> None:
    """Remove the least recently used entries beyond the bound, and what interrupted writers left."""
    entries = sorted(((entry.stat(), entry.path) for entry in os.scandir(folder)), key=lambda each: -each[0].st_mtime)
    total = 0
    for status, path in entries:
        total += status.st_size
        if total > MOST_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    """Return a setting that is no JSON as what JSON has.

    Raises:
        TypeError: it is nothing that can be told from another.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    raise TypeError(type(value).__name__)


def _surroundings() -> list[Any]:
    """Return what else the answer depends on: versions, the state of kerasmem's own files, processor, environment."""
    package = Path(__file__).parent.parent
    state = []
    for path in sorted(each for each in package.rglob("*") if each.suffix in _OWN_FILES):
        status = path.stat()
        state.append([str(path.relative_to(package)), status.st_size, status.st_mtime_ns])
    environment = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES) and name != SWITCH}
    return [
        state, platform.python_version(), [_version(name) for name in _LIBRARIES], platform.machine(), os.cpu_count(),
        _processor(), environment, _keras_settings(),
    ]  # fmt: skip


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except (OSError, ValueError):
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def _keras_settings() -> str | None:
    home = Path(os.environ.get("KERAS_HOME") or "~/.keras")
    try:
        return (home.expanduser() / "keras.json").read_text()
    except (OSError, ValueError, RuntimeError):
        return None
