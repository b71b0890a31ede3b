"""Tables in `data/`: what is known of layers, operations and networks by their names."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def table(name: str) -> Any:
    """Return what a table has."""
    return json.loads(resources.files("kerasmem.estimation").joinpath(f"data/{name}.json").read_text("utf-8"))
