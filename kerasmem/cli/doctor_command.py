"""`kerasmem doctor`."""

from __future__ import annotations

import click

from kerasmem.cli.command import Command
from kerasmem.cli.options import all_of, option
from kerasmem.cli.terminal import show_result, spinner


@click.command("doctor", cls=Command)
@all_of(option("--timeout", default=120.0), "--json")
def command(timeout: float, as_json: bool) -> int:
    """Say whether TensorFlow sees the GPU, and why not; what decides about memory here.

    TensorFlow runs in a process of its own, so that its crash is reported too. Exit codes: 0 it runs, on whatever
    device; 1 it does not.

    Examples:
      kerasmem doctor
      CUDA_VISIBLE_DEVICES=1 kerasmem doctor
      kerasmem doctor --json
    """
    from kerasmem.devices.doctor import examine
    from kerasmem.rendering.machine_tables import doctor_table

    with spinner("asking TensorFlow"):
        found = examine(timeout=timeout)
    show_result(found, as_json, doctor_table)
    return 0 if found.works else 1
