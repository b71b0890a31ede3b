"""Programs that run at once, as the workers of a cluster do."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_ports(count=1):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run_together(commands, environments, folder):
    """Run one command for each environment, with its output in out<number> and err<number>; return the exit codes."""
    running = []
    for index, (command, environment) in enumerate(zip(commands, environments, strict=True)):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        # Files, as a worker that waits for its full pipe to be read keeps the others waiting too.
        with (folder / f"out{index}").open("w") as out, (folder / f"err{index}").open("w") as errors:
            running.append(
                subprocess.Popen(list(map(str, command)), env=environment, cwd=folder, stdout=out, stderr=errors)
            )
    try:
        return [each.wait(timeout=300) for each in running]
    finally:
        for each in running:
            each.kill()
