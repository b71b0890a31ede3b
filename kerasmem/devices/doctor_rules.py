"""From what TensorFlow, the driver and the environment say to sentences on what is wrong; starts nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kerasmem.devices.doctor_child import STEP
from kerasmem.devices.live import LiveMachine
from kerasmem.units import format_size

_MISSING = re.compile(r"Could not load dynamic library '([^']+)'")
_PLACED = re.compile(r"\] .+?: \((\w+)\): /job:\S+/device:(\w+:\d+)$", re.MULTILINE)
_ERROR = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_INSUFFICIENT = re.compile(r"CUDA driver version is insufficient|forward compatibility was attempted", re.IGNORECASE)
_MISMATCH = re.compile(r"kernel version (\S+) does not match DSO version (\S+)")
_BOOKKEEPING = {"_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "Const", "NoOp", "VarHandleOp", "_EagerConst"}
_INSTALL = "pip install 'tensorflow[and-cuda]'"


@dataclass(frozen=True)
class Finding:
    """One sentence of the diagnosis.

    Attributes:
        kind: "problem", "note" or "fine".
        what: what was found.
        way_out: what to do; None where nothing is to be done.
    """

    kind: Literal["problem", "note", "fine"]
    what: str
    way_out: str | None = None


@dataclass(frozen=True)
class LogFacts:
    """What TensorFlow's log said.

    Attributes:
        missing: libraries that could not be loaded, by name.
        placed: how many operations of the small step ran on each device.
        driver: what was wrong with the driver; None for nothing.
        error: the Python exception that ended it; None for none.
        tail: its last lines.
    """

    missing: tuple[str, ...] = ()
    placed: dict[str, int] = field(default_factory=dict)
    driver: str | None = None
    error: str | None = None
    tail: tuple[str, ...] = ()


def read_log(text: str) -> LogFacts:
    """Return what a log of TensorFlow's start says.

    Examples:
        >>> read_log("dso_loader.cc:144] Could not load dynamic library 'libcudnn.so.9'; dlerror: …").missing
        ('libcudnn.so.9',)
    """
    missing = tuple(dict.fromkeys(_MISSING.findall(text)))
    placed = Counter(place for op, place in _PLACED.findall(text.rpartition(STEP)[2]) if op not in _BOOKKEEPING)
    driver = None
    if match := _MISMATCH.search(text):
        driver = f"the loaded kernel driver {match[1]} and the driver's library {match[2]} are of different versions"
    elif _INSUFFICIENT.search(text):
        driver = "the driver is older than this TensorFlow's CUDA needs"
    errors = _ERROR.findall(text)
    tail = [line for line in text.splitlines() if line.strip()][-8:]
    return LogFacts(missing, dict(placed), driver, errors[-1] if errors else None, tuple(tail))


@dataclass(frozen=True)
class BorrowedPart:
    """A private part of another package that a feature of kerasmem uses.

    Attributes:
        package: the one that it is a part of.
        feature: what is off without it.
        missing: what is missing or changed, in one line; None where it is there.
    """

    package: str
    feature: str
    missing: str | None


@dataclass(frozen=True)
class SelfReport:
    """What TensorFlow said of itself; None for what it did not get to.

    Attributes:
        tensorflow, keras: versions.
        folder: where TensorFlow was imported from.
        backend: that Keras runs on.
        built_with_cuda: whether the wheel was.
        cuda, cudnn: versions that it was built for.
        gpus: as it lists them: "name", "card", "visible", "growth" (as the program would find it).
        jit_compile: what Keras's jit_compile="auto" comes to here.
        onednn_is_left_off: whether TensorFlow's own kernels run on a CPU that oneDNN's could run on.
        float16_is_slow: whether oneDNN computes in float16 on this CPU.
        kept_model_bytes: of a small model that was trained, deleted and cleared with Keras's function, what is left.
        log: what its log said.
        failure: at which stage it ended, and how; None where it did not fail.
        borrowed: private parts of other packages, and whether they are there.
    """

    tensorflow: str | None = None
    keras: str | None = None
    folder: str | None = None
    backend: str | None = None
    built_with_cuda: bool | None = None
    cuda: str | None = None
    cudnn: str | None = None
    gpus: tuple[dict[str, Any], ...] = ()
    jit_compile: bool | None = None
    onednn_is_left_off: bool | None = None
    float16_is_slow: bool | None = None
    kept_model_bytes: int | None = None
    log: LogFacts = field(default_factory=LogFacts)
    failure: str | None = None
    borrowed: tuple[BorrowedPart, ...] = ()

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], log: LogFacts, ended: str | None) -> SelfReport:
        """Return the report from the fields that the process wrote with its stage, its log, and how it ended."""
        failure = None
        if ended is not None or facts["stage"] != "done":
            failure = f"could not {facts['stage']}: {log.error or ended or 'it ended early'}"
        told = {name: value for name, value in facts.items() if name not in ("stage", "gpus", "borrowed")}
        borrowed = tuple(BorrowedPart(**each) for each in facts.get("borrowed", ()))
        return cls(**told, gpus=tuple(facts.get("gpus", ())), log=log, failure=failure, borrowed=borrowed)


def judge(said: SelfReport, machine: LiveMachine, environ: Mapping[str, str]) -> list[Finding]:
    """Return what it all comes to."""
    found = [*_about_gpus(said, machine, environ), *_about_variables(said, environ), *_about_borrowed(said)]
    if said.failure is not None:
        found.insert(0, Finding("problem", f"TensorFlow {said.failure}", _cure(said)))
    if said.jit_compile is not None:
        state = "on" if said.jit_compile else "off"
        found.append(Finding("fine", f"XLA is {state} by default here (Keras's jit_compile='auto')"))
    if said.onednn_is_left_off and not said.gpus:
        what = "TensorFlow runs its own kernels on this CPU: in graph mode convolutions can take twice what oneDNN's do"
        way_out = "TF_ENABLE_ONEDNN_OPTS=1 before Python starts; `kerasmem advise` estimates a model with both"
        found.append(Finding("note", what, way_out))
    if said.float16_is_slow and not said.gpus:
        what = "in float16 this CPU's steps take far longer than in float32: oneDNN has no fast kernels for them"
        found.append(Finding("note", what, "mixed_bfloat16, or TF_ENABLE_ONEDNN_OPTS=0 before Python starts"))
    if said.kept_model_bytes:
        what = f"TensorFlow {said.tensorflow} keeps each model that was trained, whatever is deleted"
        what += f": {format_size(said.kept_model_bytes)} were left of a small one"
        found.append(Finding("note", what, "kerasmem.clear_session(), in place of Keras's, frees them"))
    return found


def _cure(said: SelfReport) -> str | None:
    error = said.log.error or ""
    if error.startswith("ModuleNotFoundError") and "tensorflow" in error:
        return f"install it: {_INSTALL} (or 'tensorflow' for the CPU alone)"
    if said.failure is not None and "SIGILL" in said.failure:
        return "this wheel uses processor instructions (AVX) that this machine lacks; build TensorFlow for it"
    return "run `python -c 'import tensorflow'` for the whole message"


def _about_gpus(said: SelfReport, machine: LiveMachine, environ: Mapping[str, str]) -> Iterator[Finding]:
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    cards = f"the driver lists {len(machine.devices)}, TensorFlow none"
    if said.gpus:
        yield from _about_seen(said)
    elif hidden is not None and (not hidden.strip() or hidden.strip().startswith("-")):
        what = f"TensorFlow sees no GPU: CUDA_VISIBLE_DEVICES={hidden!r} hides them all"
        yield Finding("problem" if machine.devices else "note", what, "unset CUDA_VISIBLE_DEVICES")
    elif not machine.devices:
        yield Finding("note", f"no GPU to use: {machine.reason}")
    elif hidden is not None and all(device.cuda_index is None for device in machine.devices):
        what = f"{cards}: CUDA_VISIBLE_DEVICES={hidden!r} names no card of this machine"
        yield Finding("problem", what, "unset it, or name a card that `kerasmem devices` lists")
    elif (why := _why_unseen(said, environ)) is not None:
        yield Finding("problem", f"{cards}{why[0]}", why[1])


def _why_unseen(said: SelfReport, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return why TensorFlow does not see the cards that the driver lists and the environment lets through."""
    if said.built_with_cuda is False:
        return ": this TensorFlow was built without CUDA", _INSTALL
    if said.log.driver is not None:
        return f": {said.log.driver}", "update the NVIDIA driver, and restart the machine"
    if said.log.missing:
        way_out = f"{_INSTALL} brings them"
        if "libcuda.so.1" in said.log.missing:
            way_out = "libcuda.so.1 comes with the NVIDIA driver: install it, or start the container with --gpus all"
        elif environ.get("LD_LIBRARY_PATH"):
            way_out += "; LD_LIBRARY_PATH is set and may lead to others"
        return f": libraries could not be loaded: {', '.join(said.log.missing)}", way_out
    if said.failure is not None:
        return None
    return ", and its log does not say why", "see the log below; restart the machine"


def _about_seen(said: SelfReport) -> Iterator[Finding]:
    names = ", ".join(f"{gpu['name'].removeprefix('/physical_device:')} ({gpu['card'] or '?'})" for gpu in said.gpus)
    yield Finding("fine", f"TensorFlow sees {names}")
    if not any(gpu["growth"] for gpu in said.gpus):
        what = "memory growth is off: TensorFlow takes nearly a whole card when it first touches it"
        yield Finding("note", what, "call kerasmem.enable_memory_growth() first, or set TF_FORCE_GPU_ALLOW_GROWTH=true")
    if said.log.placed and not any(place.startswith("GPU") for place in said.log.placed):
        yield Finding("problem", "a small training step ran on the CPU although there is a GPU")


def _about_variables(said: SelfReport, environ: Mapping[str, str]) -> Iterator[Finding]:
    allocator = environ.get("TF_GPU_ALLOCATOR")
    if allocator == "cuda_malloc_async":
        what = "TF_GPU_ALLOCATOR=cuda_malloc_async: CUDA's pool in place of TensorFlow's allocator"
        yield Finding("note", f"{what}; estimates of chunk waste do not hold for it")
    elif allocator:
        what = f"TF_GPU_ALLOCATOR={allocator!r} is no allocator that TensorFlow knows"
        yield Finding("problem", what, "unset it, or write cuda_malloc_async")
    growth = environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if growth not in (None, "true", "false"):
        what = f"TF_FORCE_GPU_ALLOW_GROWTH={growth!r} is not understood and has no effect"
        yield Finding("problem", what, "write true or false, in small letters")
    jax = sorted(name for name in environ if name.startswith("XLA_PYTHON_CLIENT_"))
    if jax and said.backend != "jax":
        what = f"{', '.join(jax)}: JAX's; TensorFlow does not read {'it' if len(jax) == 1 else 'them'}"
        yield Finding("note", what, "for TensorFlow, TF_FORCE_GPU_ALLOW_GROWTH=true")
    if said.backend == "jax":
        taken = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ".75")
        what = f"Keras runs on jax, not on TensorFlow; JAX takes {taken} of a card at once"
        if environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
            what = "Keras runs on jax, not on TensorFlow; JAX takes memory as it needs it, in regions that grow"
        if "JAX_COMPILATION_CACHE_DIR" in environ:
            what += "; compiled steps are kept in JAX_COMPILATION_CACHE_DIR"
        yield Finding("note", what, "XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_PYTHON_CLIENT_MEM_FRACTION=.9")
    elif said.backend not in (None, "tensorflow"):
        yield Finding("note", f"Keras runs on {said.backend}, not on TensorFlow", "KERAS_BACKEND=tensorflow")


def _about_borrowed(said: SelfReport) -> Iterator[Finding]:
    found: dict[tuple[str, str], list[str]] = {}
    for each in said.borrowed:
        if each.missing is not None:
            found.setdefault((each.feature, each.package), []).append(each.missing)
    if said.borrowed and not found:
        what = f"all {len(said.borrowed)} private parts of other packages that kerasmem uses are there"
        yield Finding("fine", what)
    for (feature, package), missing in found.items():
        what = f"off or unsure: {feature} ({'; '.join(missing)})"
        yield Finding("note", what, f"install a version of {package} that has it")
