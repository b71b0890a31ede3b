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


def environment(*packages: str) -> dict[str, Any]:
    """Return versions and the machine's cores, without its name."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0)),
        **{name: metadata.version(name) for name in packages},
    }


def write_results(name: str, data: dict[str, Any]) -> Path:
    """Write results/NAME.json by way of a temporary name, and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    return path
