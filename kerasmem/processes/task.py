"""A piece of work in a process of its own: with a time limit, a memory limit and an answer in JSON.

The parent calls `run_child("package.worker", {…})`, and `package.worker` ends with `serve(function)`. What goes
wrong in the child is an exception in the parent: errors of kerasmem come through as they are, everything else
is a `ChildFailure` with a reason that fits into one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kerasmem import errors
from kerasmem.errors import KerasmemError
from kerasmem.processes.children import (
    ChildFailure,
    Limits,
    child_environment,
    communicate,
    die_with_parent,
    end_group,
    exit_reason,
    start_module,
)

# Lines of a log that say nothing of what went wrong: I0000, W0000, "2026-01-01 10:00:00.1: I …", "WARNING:…".
_NOISE = re.compile(r"\s*([IW]\d{4} |WARNING\b|INFO\b|\d{4}-\d\d-\d\d [\d:.]+: [IW] |\^|File \"|Traceback|[~^]+$)")

_waiting: dict[str, subprocess.Popen[bytes]] = {}  # children that were started ahead, by their module


@contextlib.contextmanager
def started_ahead(module: str, env: Mapping[str, str] | None = None) -> Iterator[None]:
    """Start the child of the first `run_child` inside ahead of time.

    Args:
        module: the child's module.
        env: environment variables for the child, as `run_child` is given them.
    """
    process = _waiting[module] = _started(module, env)
    try:
        yield
    finally:
        if _waiting.get(module) is process:  # nobody asked it
            del _waiting[module]
            end_group(process.pid)
            process.communicate()


def _started(module: str, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return start_module(module, environ=child_environment(**(env or {})), stdin=pipe, stdout=pipe, stderr=pipe)


def run_child(
    module: str,
    request: Mapping[str, Any],
    *,
    timeout: float,
    memory_limit: int | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `python -m MODULE` with `request` and return its answer.

    The child finds modules where this process does, in the same folder. It has a process group of its own, which is
    ended as a whole when the time is over, when the child's memory passes the limit, and on Ctrl-C.

    Args:
        module: the child's module; it calls `serve`.
        request: JSON-ready data for it.
        timeout: seconds.
        memory_limit: bytes of memory that the child may have resident; looked at ten times a second.
        env: environment variables for the child beside the parent's own.

    Raises:
        ChildFailure: If the child gave no answer; the reason says why.
        KerasmemError: If the child raised it.
    """
    process = _waiting.pop(module, None) or _started(module, env)
    out, err = communicate(process, json.dumps(request).encode(), Limits(timeout, memory_limit))
    return _answer(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def serve(function: Callable[[dict[str, Any]], dict[str, Any]], load: Callable[[], object] | None = None) -> None:
    """Read a request from standard input, call `function`, and write its answer as the last line of standard output.

    What `function` and the libraries that it uses print goes to standard error.

    Args:
        function: from the request to the answer.
        load: imports what `function` will need, before the request is there; what fails then fails in `function` too.
    """
    die_with_parent()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if load is not None:
        with contextlib.suppress(Exception):
            load()
    try:
        data: dict[str, Any] = {"result": function(json.load(sys.stdin))}
        text = json.dumps(data)
    except KerasmemError as error:
        names = [each.__name__ for each in type(error).__mro__ if issubclass(each, KerasmemError)]
        text = json.dumps({"error": {"classes": names, "message": str(error)}})
    except MemoryError:
        text = json.dumps({"crash": "out of host memory (MemoryError)"})
    except Exception as error:
        traceback.print_exc()
        text = json.dumps({"crash": _one_line(f"{type(error).__name__}: {error}")})
    with answer:
        answer.write("\n" + text + "\n")


def _answer(code: int, out: str, err: str) -> dict[str, Any]:
    data = _last_object(out)
    if "error" in data:
        raise _rebuilt(data["error"])
    if "crash" in data:
        raise ChildFailure(str(data["crash"]))
    if isinstance(data.get("result"), dict):  # even where the libraries then fail to shut down
        result: dict[str, Any] = data["result"]
        return result
    said = _last_meaningful(err)
    more = f": {said}" if said else ""
    if code < 0:
        raise ChildFailure(f"it was ended by {exit_reason(code)}{more}", signal=-code)
    raise ChildFailure(f"it ended with exit code {code} and no answer{more}")


def _last_object(out: str) -> dict[str, Any]:
    lines = out.strip().splitlines()
    try:
        data = json.loads(lines[-1]) if lines else {}
    except ValueError:  # something that was printed
        return {}
    return data if isinstance(data, dict) else {}


def _rebuilt(error: Mapping[str, Any]) -> KerasmemError:
    """Return the child's error, as the nearest class that `kerasmem.errors` has."""
    message = str(error["message"])
    names = [str(name) for name in error["classes"]]
    if ChildFailure.__name__ in names:
        return ChildFailure(message)
    cls = next((getattr(errors, name) for name in names if hasattr(errors, name)), KerasmemError)
    rebuilt: KerasmemError = cls.__new__(cls)
    rebuilt.args = (message,)
    return rebuilt


def _last_meaningful(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    return _one_line(lines[-1]) if lines else ""


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
