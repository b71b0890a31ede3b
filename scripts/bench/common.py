"""Machine description, child processes and result files, shared by the benches."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasmem.devices.recording import AllocatorEvent

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parent.parent.parent
if str(ROOT) not in sys.path:  # the benches import this checkout's kerasmem
    sys.path.insert(0, str(ROOT))
MIB = 2**20
# CPU features that decide which kernels run, as Linux names them.
FEATURES = frozenset((
    "amx_bf16", "amx_fp16", "amx_int8", "amx_tile", "avx2", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512f",
    "avx_ne_convert", "avx_vnni",
))  # fmt: skip


def environment(*packages: str) -> dict[str, Any]:
    """Return versions, cores and the kind of processor, without the machine's name."""
    from kerasmem.devices.kernels import cpu_flags

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None),
        "processor_features": sorted(FEATURES & cpu_flags()),
        **{name: metadata.version(name) for name in packages},
    }


def write_results(name: str, data: dict[str, Any]) -> None:
    """Write results/NAME.json atomically."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


def read_results(name: str) -> dict[str, Any]:
    """Return the content of results/NAME.json, empty if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def tensorflow_environ(*, bfc: bool = True, onednn: bool | None = None, limit_mib: int | None = None) -> dict[str, str]:
    """Return environment variables for a child process that trains on the CPU.

    Args:
        bfc: Whether it uses the allocator that GPUs have.
        onednn: Whether it runs oneDNN's kernels. Defaults to TensorFlow's choice.
        limit_mib: Memory limit of the BFC allocator.
    """
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": str(ROOT)}
    if bfc:
        variables["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    if onednn is not None:
        variables["TF_ENABLE_ONEDNN_OPTS"] = str(int(onednn))
    if limit_mib is not None:
        variables["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mib)
    return variables


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a child process. The code is None after a timeout."""

    code: int | None
    out: str
    error: str

    @property
    def answer(self) -> Any:
        """The JSON on the last line of its output."""
        return json.loads(self.out.strip().splitlines()[-1])


def run_python(*arguments: object, environ: dict[str, str], timeout: float | None = None) -> Ended:
    """Run Python in a new session, which is killed with all its children after a timeout or Ctrl-C."""
    child = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
        start_new_session=True,
    )
    try:
        out, error = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Ended(None, "", f"no answer in {timeout:.0f} s")
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    return Ended(child.returncode, out, error)


def answer_of(*arguments: object, environ: dict[str, str], timeout: float | None = None) -> Any:
    """Run Python and return the JSON on its last line. Exit with its messages if it fails."""
    ended = run_python(*arguments, environ=environ, timeout=timeout)
    if ended.code != 0:
        raise SystemExit(f"{' '.join(map(str, arguments))}\n{ended.error[-3000:]}")
    return ended.answer


def recorded_allocations(step: Callable[[], object]) -> tuple[AllocatorEvent, ...]:
    """Run a step under TensorFlow's profiler and return the events of the CPU's BFC allocator."""
    import tensorflow as tf

    from kerasmem.devices.recording import of_device, read_recording, start_recording

    with tempfile.TemporaryDirectory() as folder:
        start_recording(folder)
        step()
        tf.profiler.experimental.stop()
        return of_device(read_recording(folder, "none")[0], "CPU:0")


def most_requested(events: Iterable[AllocatorEvent]) -> int:
    """Return the peak of the requested bytes, without waste in chunks and allocations before the recording."""
    live: dict[int, int] = {}
    now = most = 0
    for event in events:
        if event.kind == "allocate":
            live[event.address] = event.requested
            now += event.requested
            most = max(most, now)
        else:
            now -= live.pop(event.address, 0)
    return most
