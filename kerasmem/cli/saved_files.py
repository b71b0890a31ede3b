"""Reports that earlier commands saved, told apart from models and logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LARGEST = 64 * 2**20
_LOGS = (b'{"kind"', b'{"kind ')  # how a log begins, each of whose lines is an object


def json_object(path: str) -> dict[str, Any] | None:
    """Return the object in a file that holds one JSON object; None for anything else, and for what cannot be read.

    Raises:
        RecursionError: it is nested too deeply.
    """
    file = Path(path)
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return None
        with file.open("rb") as opened:
            start = opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        if not start.startswith(b"{") or start.startswith(_LOGS):
            return None
        data = json.loads(file.read_text("utf-8-sig", errors="replace"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
