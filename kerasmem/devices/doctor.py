"""Diagnosis of TensorFlow and its GPUs from its own report, the driver and the environment."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kerasmem.devices.doctor_child import STEP
from kerasmem.devices.limits import read_limits
from kerasmem.devices.live import LiveMachine, read_machine
from kerasmem.errors import UsageError
from kerasmem.processes.children import ChildFailure, Limits, communicate, exit_name, start_module
from kerasmem.records import Record

_PREFIXES = ("TF_", "XLA_", "CUDA_", "KERAS_", "NVIDIA_", "LD_LIBRARY_PATH", "JAX_", "SLURM_MEM_", "SLURM_JOB_GPUS")
_LOGGED = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1"}  # the log then names missing libraries
_MISSING = re.compile(r"Could not load dynamic library '([^']+)'")
_PLACED = re.compile(r"\] .+?: \((\w+)\): /job:\S+/device:(\w+:\d+)$", re.MULTILINE)
_ERROR = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_INSUFFICIENT = re.compile(r"CUDA driver version is insufficient|forward compatibility was attempted", re.IGNORECASE)
_MISMATCH = re.compile(r"kernel version (\S+) does not match DSO version (\S+)")
_BOOKKEEPING = {"_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "Const", "NoOp", "VarHandleOp", "_EagerConst"}
_INSTALL = "pip install 'tensorflow[and-cuda]'"
_KINDS = ("problem", "note", "fine")


@dataclass(frozen=True)
class Finding:
    """One sentence of the diagnosis.

    Attributes:
        kind: "problem", "note" or "fine".
        what: the observation.
        way_out: the fix, or None if nothing needs fixing.
    """

    kind: Literal["problem", "note", "fine"]
    what: str
    way_out: str | None = None


@dataclass(frozen=True)
class LogFacts:
    """Facts from TensorFlow's log.

    Attributes:
        missing: names of libraries that could not be loaded.
        placed: number of operations of the small step by device.
        driver: a problem of the driver, or None.
        error: the Python exception that ended the process, or None.
        tail: the last lines.
    """

    missing: tuple[str, ...] = ()
    placed: dict[str, int] = field(default_factory=dict)
    driver: str | None = None
    error: str | None = None
    tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelfReport:
    """TensorFlow's report on itself. A field is None if the process ended before it.

    Attributes:
        tensorflow, keras: versions.
        folder: the folder that TensorFlow was imported from.
        backend: Keras's backend.
        built_with_cuda: whether this TensorFlow was built with CUDA.
        cuda, cudnn: versions that it was built for.
        gpus: its GPUs: "name", "card", "visible", "growth" (the setting that a program finds).
        jit_compile: the value of Keras's `jit_compile="auto"` here.
        onednn_is_left_off: whether TensorFlow's own kernels run on a CPU that supports oneDNN's.
        borrowed: number of private parts of other packages that kerasmem looked for.
        lost: those that are missing or changed: "package", "feature" and "missing".
        log: facts from its log.
        failure: the stage at which it failed, and how; None if it did not fail.
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
    borrowed: int | None = None
    lost: tuple[dict[str, str], ...] = ()
    log: LogFacts = field(default_factory=LogFacts)
    failure: str | None = None


@dataclass(frozen=True)
class Examination(Record, what="examination", version=1, also=("works", "sees_gpu")):
    """Result of `kerasmem doctor`.

    Attributes:
        python: version and system.
        machine: the cards that the driver lists, and host memory.
        environment: variables that TensorFlow, Keras, CUDA or Slurm read.
        findings: the diagnosis, the worst first.
        said: TensorFlow's report on itself.
    """

    python: str
    machine: LiveMachine
    environment: dict[str, str]
    findings: tuple[Finding, ...]
    said: SelfReport = field(metadata={"json": "tensorflow"})

    @property
    def sees_gpu(self) -> bool:
        """Whether TensorFlow sees a GPU."""
        return bool(self.said.gpus)

    @property
    def works(self) -> bool:
        """Whether TensorFlow ran a small step to its end, on any device."""
        return self.said.failure is None


def examine(timeout: float = 120.0) -> Examination:
    """Ask TensorFlow in a subprocess, the driver and the system, and judge.

    Args:
        timeout: seconds that TensorFlow gets.

    Raises:
        UsageError: If `timeout` is not above 0.
    """
    if not timeout > 0:
        raise UsageError(f"timeout must be seconds above 0; got {timeout!r}")
    machine, said = read_machine(), _ask_tensorflow(timeout)
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) and not name.startswith("TF_CLI_"))
    findings = judge(said, machine, os.environ)
    findings += [Finding("note", text) for text in read_limits().notes]
    findings.sort(key=lambda finding: _KINDS.index(finding.kind))
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Examination(python, machine, {name: os.environ[name] for name in names}, tuple(findings), said)


def _ask_tensorflow(timeout: float) -> SelfReport:
    """Import TensorFlow, list its GPUs and run a small step, in a subprocess that may crash or hang."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # PYTHONSAFEPATH keeps modules of the current folder from running.
        settings = {**os.environ, **_LOGGED, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        with log.open("wb") as stream:
            process = start_module(
                "kerasmem.devices.doctor_child", str(result), environ=settings, stdout=subprocess.DEVNULL, stderr=stream
            )
            try:
                communicate(process, None, Limits(seconds=timeout))
                kind = "it crashed ({})" if process.returncode < 0 else "it ended with {}"
                ended = kind.format(exit_name(process.returncode)) if process.returncode else None
            except ChildFailure:
                ended = f"it had not ended after {timeout:g} s"
        try:
            facts = json.loads(result.read_text())
        except (OSError, ValueError):
            facts = {"stage": "start Python"}
        return self_report(facts, log.read_text("utf-8", "replace"), ended)


def self_report(facts: Mapping[str, Any], log: str, ended: str | None = None) -> SelfReport:
    """Combine the fields that the subprocess wrote, its log, and how it ended (None: normally)."""
    read = _read_log(log)
    failure = None
    if ended is not None or facts["stage"] != "done":
        failure = f"could not {facts['stage']}: {read.error or ended or 'it ended early'}"
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    del fields["stage"]
    return SelfReport(**fields, log=read, failure=failure)


def _read_log(text: str) -> LogFacts:
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


def judge(said: SelfReport, machine: LiveMachine, environ: Mapping[str, str]) -> list[Finding]:
    """Return the findings on a machine."""
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
    return found


def _cure(said: SelfReport) -> str:
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
    else:
        yield from _about_unseen(said, cards, environ)


def _about_unseen(said: SelfReport, cards: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    if said.built_with_cuda is False:
        yield Finding("problem", f"{cards}: this TensorFlow was built without CUDA", _INSTALL)
    elif said.log.driver is not None:
        yield Finding("problem", f"{cards}: {said.log.driver}", "update the NVIDIA driver, and restart the machine")
    elif said.log.missing:
        way_out = f"{_INSTALL} brings them"
        if "libcuda.so.1" in said.log.missing:
            way_out = "libcuda.so.1 comes with the NVIDIA driver: install it, or start the container with --gpus all"
        elif environ.get("LD_LIBRARY_PATH"):
            way_out += "; LD_LIBRARY_PATH is set and may lead to others"
        yield Finding("problem", f"{cards}: libraries could not be loaded: {', '.join(said.log.missing)}", way_out)
    elif said.failure is None:
        what = f"{cards}, and its log does not say why"
        yield Finding("problem", what, "see the log below; restart the machine")


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
    if said.backend == "jax":
        taken = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ".75")
        how = f"takes {taken} of a card at once"
        if environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
            how = "takes memory as it needs it, in regions that grow"
        way_out = "XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_PYTHON_CLIENT_MEM_FRACTION=.9"
        yield Finding("note", f"Keras runs on jax, not on TensorFlow; JAX {how}", way_out)
    elif said.backend not in (None, "tensorflow"):
        yield Finding("note", f"Keras runs on {said.backend}, not on TensorFlow", "KERAS_BACKEND=tensorflow")


def _about_borrowed(said: SelfReport) -> Iterator[Finding]:
    if said.borrowed and not said.lost:
        yield Finding("fine", f"all {said.borrowed} private parts of other packages that kerasmem uses are there")
    for each in said.lost:
        what = f"off or unsure: {each['feature']} ({each['missing']})"
        yield Finding("note", what, f"install a version of {each['package']} that has it")
