"""Does TensorFlow see the GPU, and if not, why: what it says of itself, judged beside driver and environment."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from kerasmem.devices.doctor_rules import Finding, SelfReport, judge, read_log
from kerasmem.devices.limits import read_limits
from kerasmem.devices.live import LiveMachine, read_machine
from kerasmem.errors import UsageError
from kerasmem.processes.children import ChildFailure, Limits, communicate, exit_name, start_module
from kerasmem.records import Record

_PREFIXES = ("TF_", "XLA_", "CUDA_", "KERAS_", "NVIDIA_", "LD_LIBRARY_PATH", "JAX_", "SLURM_MEM_", "SLURM_JOB_GPUS")
_LOGGED = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1"}  # libraries that are missing are named there


@dataclass(frozen=True)
class Examination(Record, what="examination", version=1, also=("works", "sees_gpu")):
    """What `kerasmem doctor` found.

    Attributes:
        python: version and system.
        machine: the cards as the driver lists them, and host memory.
        environment: variables that TensorFlow, Keras, CUDA or Slurm read.
        findings: what it comes to, the worst first.
        said: what TensorFlow said of itself before it ended.
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
        """Whether TensorFlow ran a small step to its end, on whatever device."""
        return self.said.failure is None


def examine(timeout: float = 120.0) -> Examination:
    """Ask TensorFlow in a process of its own, the driver and the system, and judge.

    Args:
        timeout: seconds that TensorFlow gets.

    Raises:
        UsageError: the timeout is not above 0.
    """
    if not timeout > 0:
        raise UsageError(f"timeout: {timeout!r} is no number of seconds above 0")
    machine, said = read_machine(), ask_tensorflow(timeout)
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) and not name.startswith("TF_CLI_"))
    findings = judge(said, machine, os.environ)
    findings += [Finding("note", text) for text in read_limits().notes]
    findings.sort(key=lambda finding: ("problem", "note", "fine").index(finding.kind))
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Examination(python, machine, {name: os.environ[name] for name in names}, tuple(findings), said)


def ask_tensorflow(timeout: float) -> SelfReport:
    """Import TensorFlow, list its GPUs and run a small step, in a process of its own that may crash or hang."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        # safe: no module that lies in the present folder is run
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
        said = read_log(log.read_text("utf-8", "replace"))
        try:
            facts = json.loads(result.read_text())
        except (OSError, ValueError):
            facts = {"stage": "start Python"}
        return SelfReport.from_facts(facts, said, ended)
