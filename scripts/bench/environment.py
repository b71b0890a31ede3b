"""What a bench must say of the machine it ran on, and how it writes its results."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parent.parent.parent
if str(ROOT) not in sys.path:  # this checkout's kerasmem, for the bench's own modules
    sys.path.insert(0, str(ROOT))


def environment(*packages: str) -> dict[str, Any]:
    """Return versions, the machine's cores and the kind of its processor, without the machine's name."""
    from kerasmem.devices.kernels import cpu_facts

    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0)),
        **cpu_facts(),
        **{name: metadata.version(name) for name in packages},
    }


def facts_of_rows() -> dict[str, Any]:
    """Return what a row of the data set says of the software, the machine and its license."""
    from kerasmem.estimation.truth.rows import LICENSE

    here = environment("tensorflow", "keras", "numpy")
    versions = {name: here.pop(name) for name in ("python", "tensorflow", "keras", "numpy")}
    machine = {**here, "device": "cpu"}
    return {"license": LICENSE, "versions": versions, "machine": machine}


def write_results(name: str, data: dict[str, Any]) -> Path:
    """Write results/NAME.json by way of a temporary name, and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    return path
