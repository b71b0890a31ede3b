"""`kerasmem devices` and `kerasmem doctor`: this machine."""

from __future__ import annotations

import click

from kerasmem.cli.command import Command
from kerasmem.cli.options import all_of, option
from kerasmem.cli.terminal import show_json, show_result, show_text, spinner


@click.command("devices", cls=Command)
@all_of("--json")
def devices_command(as_json: bool) -> None:
    """List the cards of the catalogue, and the GPUs and memory of this machine.

    --json includes the source of each figure.

    Examples:
      kerasmem devices
      kerasmem devices --json
    """
    from kerasmem.devices.catalogue import all_cards
    from kerasmem.devices.machine import read_machine

    machine = read_machine()
    if as_json:
        catalogue = [card.to_dict() for card in all_cards()]
        show_json({"format_version": 1, "machine": machine.to_dict(), "catalogue": catalogue})
        return
    from kerasmem.rendering.machine_tables import devices_table

    show_text(lambda terminal: devices_table(all_cards(), machine, terminal))


@click.command("doctor", cls=Command)
@all_of(option("--timeout", default=120.0), "--json")
def doctor_command(timeout: float, as_json: bool) -> int:
    """Check whether TensorFlow sees the GPU, and list the settings that affect memory.

    TensorFlow runs in a subprocess, so that a crash is reported too. Exit codes: 0 TensorFlow works on any device ·
    1 it does not.

    Examples:
      kerasmem doctor
      CUDA_VISIBLE_DEVICES=1 kerasmem doctor
      kerasmem doctor --json
    """
    from kerasmem.devices.examination import doctor
    from kerasmem.rendering.machine_tables import doctor_table

    with spinner("running TensorFlow"):
        examination = doctor(timeout=timeout)
    show_result(examination, as_json, doctor_table)
    return 0 if examination.works else 1
