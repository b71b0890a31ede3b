"""`kerasmem devices`."""

from __future__ import annotations

import click

from kerasmem.cli.command import Command
from kerasmem.cli.options import all_of
from kerasmem.cli.terminal import show_json, show_text


@click.command("devices", cls=Command)
@all_of("--json")
def command(as_json: bool) -> None:
    """List the cards that --device knows, and the GPUs and memory of this machine.

    --json has the source of each figure.

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
