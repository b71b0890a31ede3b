"""Diagnosis of TensorFlow and its GPUs from a report in a subprocess, the driver and the environment."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kerasmem.compat.borrowing import all_borrowed
from kerasmem.devices.host import limit_note
from kerasmem.devices.machine import LiveMachine, read_machine
from kerasmem.errors import UsageError
from kerasmem.processes.children import end_group, exit_name, start_module
from kerasmem.records import Record

_PREFIXES = ("TF_", "XLA_", "CUDA_", "KERAS_", "NVIDIA_", "LD_LIBRARY_PATH", "JAX_", "SLURM_MEM_", "SLURM_JOB_GPUS")
_LOGGED = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1"}  # log missing libraries
_MISSING = re.compile(r"Could not load dynamic library '([^']+)'")
_ERROR = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_INSUFFICIENT = re.compile(r"CUDA driver version is insufficient|forward compatibility was attempted", re.IGNORECASE)
_MISMATCH = re.compile(r"kernel version (\S+) does not match DSO version (\S+)")
_INSTALL = "pip install 'tensorflow[and-cuda]'"
_KINDS = ("problem", "note", "fine")


@dataclass(frozen=True)
class Finding:
    """One finding of the diagnosis.

    Attributes:
        kind: "problem", "note" or "fine".
        what: the observation.
        fix: the fix, or None.
    """

    kind: Literal["problem", "note", "fine"]
    what: str
    fix: str | None = None


@dataclass(frozen=True)
class SelfReport:
    """Report of a subprocess with TensorFlow. Fields that the process did not reach have the value None.

    Attributes:
        tensorflow, keras: versions.
        folder: folder of the imported TensorFlow.
        backend: backend of Keras.
        built_with_cuda: whether TensorFlow was built with CUDA.
        cuda, cudnn: versions with which TensorFlow was built.
        gpus: GPUs of TensorFlow: "name", "card", "growth" (the current setting).
        jit_compile: value of Keras's `jit_compile="auto"`.
        lost: missing private parts of other packages that kerasmem needs: "package", "feature" and "missing".
        missing_libraries: names of libraries that could not be loaded, from the log.
        driver_problem: a problem of the driver, from the log.
        error: the Python exception that ended the process, from the log.
        log: the last lines of the log.
        failure: the failed stage and the reason; None if there was no failure.
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
    lost: tuple[dict[str, str], ...] = ()
    missing_libraries: tuple[str, ...] = ()
    driver_problem: str | None = None
    error: str | None = None
    log: tuple[str, ...] = ()
    failure: str | None = None


@dataclass(frozen=True)
class Examination(Record, what="examination", version=1, also=("works", "sees_gpu")):
    """Result of `kerasmem doctor`.

    Attributes:
        python: version of Python, and the system.
        machine: the driver's GPUs, and host memory.
        environment: variables of TensorFlow, Keras, CUDA and Slurm.
        findings: the diagnosis, the worst first.
        tensorflow: the report of the subprocess.
    """

    python: str
    machine: LiveMachine
    environment: dict[str, str]
    findings: tuple[Finding, ...]
    tensorflow: SelfReport

    @property
    def sees_gpu(self) -> bool:
        """Whether TensorFlow sees a GPU."""
        return bool(self.tensorflow.gpus)

    @property
    def works(self) -> bool:
        """Whether TensorFlow completed a small training step on any device."""
        return self.tensorflow.failure is None


def doctor(timeout: float = 120.0) -> Examination:
    """Find out if TensorFlow sees the GPU, and if not, why.

    TensorFlow runs a small step in a subprocess, so a crash or a hang is a finding too.

    Args:
        timeout: seconds for TensorFlow. Defaults to 120.

    Returns:
        An `Examination`: the findings, with `works` and `sees_gpu`.

    Raises:
        UsageError: If `timeout` is not above 0.

    Examples:
        >>> import kerasmem
        >>> kerasmem.doctor().sees_gpu  # doctest: +SKIP
        True
    """
    if not timeout > 0:
        raise UsageError(f"timeout must be above 0 seconds; got {timeout!r}")
    machine, report = read_machine(), _run_tensorflow(timeout)
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) and not name.startswith("TF_CLI_"))
    findings = judge(report, machine, os.environ)
    if (note := limit_note()) is not None:
        findings.append(Finding("note", note))
    findings.sort(key=lambda finding: _KINDS.index(finding.kind))
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Examination(python, machine, {name: os.environ[name] for name in names}, tuple(findings), report)


def _run_tensorflow(timeout: float) -> SelfReport:
    """Import TensorFlow, list its GPUs and run a small step in a subprocess, which may crash or hang."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # PYTHONSAFEPATH prevents imports from the current folder.
        settings = {**os.environ, **_LOGGED, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        with log.open("wb") as stream:
            process = start_module(
                "kerasmem.devices.examination", str(result), environ=settings, stdout=subprocess.DEVNULL, stderr=stream
            )
            try:
                code = process.wait(timeout)
                kind = "it crashed ({})" if code < 0 else "it ended with {}"
                ended = kind.format(exit_name(code)) if code else None
            except subprocess.TimeoutExpired:
                ended = f"it had not ended after {timeout:g} s"
            finally:  # also on Ctrl-C
                end_group(process.pid)
                process.wait()
        try:
            facts = json.loads(result.read_text())
        except (OSError, ValueError):
            facts = {"stage": "start Python"}
        return self_report(facts, log.read_text("utf-8", "replace"), ended)


def self_report(facts: Mapping[str, Any], log: str, ended: str | None = None) -> SelfReport:
    """Combine the fields from the subprocess, its log, and the reason why it ended (None if it succeeded)."""
    driver = None
    if match := _MISMATCH.search(log):
        driver = f"the kernel driver {match[1]} and its library {match[2]} have different versions"
    elif _INSUFFICIENT.search(log):
        driver = "the driver is too old for the CUDA version of this TensorFlow"
    error = next(reversed(_ERROR.findall(log)), None)
    failure = None
    if ended is not None or facts["stage"] != "done":
        failure = f"could not {facts['stage']}: {error or ended or 'it ended early'}"
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    del fields["stage"]
    return SelfReport(
        **fields,
        missing_libraries=tuple(dict.fromkeys(_MISSING.findall(log))),
        driver_problem=driver,
        error=error,
        log=tuple([line for line in log.splitlines() if line.strip()][-8:]),
        failure=failure,
    )


def judge(report: SelfReport, machine: LiveMachine, environ: Mapping[str, str]) -> list[Finding]:
    """Diagnose a machine."""
    findings = [*_about_gpus(report, machine, environ), *_about_variables(report, environ)]
    for part in report.lost:
        what = f"{part['feature']} does not work: {part['missing']} is missing"
        findings.append(Finding("note", what, f"install another version of {part['package']}"))
    if report.failure is not None:
        findings.insert(0, Finding("problem", f"TensorFlow {report.failure}", _fix(report)))
    if report.jit_compile is not None:
        state = "on" if report.jit_compile else "off"
        findings.append(Finding("fine", f"XLA is {state} by default here (Keras's jit_compile='auto')"))
    return findings


def _fix(report: SelfReport) -> str:
    error = report.error or ""
    if error.startswith("ModuleNotFoundError") and "tensorflow" in error:
        return f"install it: {_INSTALL} (or 'tensorflow' if there is only a CPU)"
    return "run `python -c 'import tensorflow'` for the full message"


def _about_gpus(report: SelfReport, machine: LiveMachine, environ: Mapping[str, str]) -> list[Finding]:
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if report.gpus:
        return _about_seen(report)
    if hidden is not None and (not hidden.strip() or hidden.strip().startswith("-")):
        what = f"TensorFlow sees no GPU: CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs"
        return [Finding("problem" if machine.devices else "note", what, "unset CUDA_VISIBLE_DEVICES")]
    if not machine.devices:
        return [Finding("note", f"no GPU: {machine.reason}")]
    if hidden is not None and all(device.cuda_index is None for device in machine.devices):
        cause = f"CUDA_VISIBLE_DEVICES={hidden!r} has no GPU of this machine"
        fix = "unset it, or set it to a GPU that `kerasmem devices` lists"
    elif report.built_with_cuda is False:
        cause, fix = "this TensorFlow was built without CUDA", _INSTALL
    elif report.driver_problem is not None:
        cause, fix = report.driver_problem, "update the NVIDIA driver and restart the machine"
    elif report.missing_libraries:
        cause = f"libraries could not be loaded: {', '.join(report.missing_libraries)}"
        fix = f"{_INSTALL} installs them"
        if "libcuda.so.1" in report.missing_libraries:
            fix = "install the NVIDIA driver (libcuda.so.1); if this is a container, start it with --gpus all"
    elif report.failure is None:
        cause, fix = "its log has no reason", "see the log below; restart the machine"
    else:
        return []
    return [Finding("problem", f"the driver lists {len(machine.devices)} GPUs, TensorFlow none: {cause}", fix)]


def _about_seen(report: SelfReport) -> list[Finding]:
    names = ", ".join(f"{gpu['name'].removeprefix('/physical_device:')} ({gpu['card'] or '?'})" for gpu in report.gpus)
    findings = [Finding("fine", f"TensorFlow sees {names}")]
    if not any(gpu["growth"] for gpu in report.gpus):
        what = "memory growth is off: TensorFlow allocates nearly the whole card on first use"
        fix = "call kerasmem.enable_memory_growth() first, or set TF_FORCE_GPU_ALLOW_GROWTH=true"
        findings.append(Finding("note", what, fix))
    return findings


def _about_variables(report: SelfReport, environ: Mapping[str, str]) -> Iterator[Finding]:
    allocator = environ.get("TF_GPU_ALLOCATOR")
    if allocator == "cuda_malloc_async":
        what = "TF_GPU_ALLOCATOR=cuda_malloc_async: CUDA's allocator instead of TensorFlow's"
        yield Finding("note", f"{what}; estimates of the allocator's waste do not apply to it")
    elif allocator:
        what = f"TF_GPU_ALLOCATOR must be cuda_malloc_async or unset; got {allocator!r}"
        yield Finding("problem", what, "unset it, or set cuda_malloc_async")
    growth = environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if growth not in (None, "true", "false"):
        what = f"TF_FORCE_GPU_ALLOW_GROWTH={growth!r} has no effect"
        yield Finding("problem", what, "set it to true or false, in lower case")
    if report.backend not in (None, "tensorflow"):
        yield Finding("note", f"Keras runs on {report.backend}, not on TensorFlow", "KERAS_BACKEND=tensorflow")


def report_to(path: str) -> None:
    """Write fields of `SelfReport` to a JSON file, in a process that may crash.

    The file is written before each stage, so that a crash preserves earlier fields.
    """
    facts: dict[str, Any] = {}

    def reach(stage: str) -> None:
        facts["stage"] = stage
        Path(path).write_text(json.dumps(facts))

    reach("import tensorflow")
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    facts |= {"tensorflow": str(tf.__version__), "folder": str(Path(tf.__file__).parent)}
    facts |= {"cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}
    facts["built_with_cuda"] = bool(tf.test.is_built_with_cuda())
    reach("import keras")
    import keras

    facts |= {"keras": str(keras.__version__), "backend": str(keras.config.backend())}
    reach("list the GPUs")
    gpus = tf.config.list_physical_devices("GPU")
    facts["gpus"] = [
        {
            "name": gpu.name,
            "card": tf.config.experimental.get_device_details(gpu).get("device_name"),
            "growth": tf.config.experimental.get_memory_growth(gpu),
        }
        for gpu in gpus
    ]
    reach("start the devices")
    for gpu in gpus:  # do not allocate a whole card
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.list_logical_devices()
    if facts["backend"] == "tensorflow":
        reach("run a small training step")
        _step(tf, keras, facts)
    reach("look up private parts of other packages")
    parts = [part for part in all_borrowed() if importlib.util.find_spec(part.package) is not None]
    facts["lost"] = [
        {"package": part.package, "feature": part.feature, "missing": part.target}
        for part in parts
        if not part.exists()
    ]
    reach("done")


def _step(tf: Any, keras: Any, facts: dict[str, Any]) -> None:
    import numpy as np

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    facts["jit_compile"] = bool(model.jit_compile)  # as Keras resolves "auto" here
    model.train_on_batch(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"))


if __name__ == "__main__":
    report_to(sys.argv[1])
