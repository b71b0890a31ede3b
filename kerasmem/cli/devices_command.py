"""`kerasmem devices`."""

from __future__ import annotations

import click

EXAMPLES = """\b
Examples:
  kerasmem devices
  kerasmem devices --sources
  kerasmem devices --json"""


@click.command("devices", epilog=EXAMPLES)
@click.option("--sources", is_flag=True, help="Show where each card's memory figure comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(sources: bool, as_json: bool) -> None:
    """List the cards that --device knows, and the GPUs and memory of this machine."""
    from kerasmem.cli.terminal import console, is_terminal
    from kerasmem.devices.catalogue import CARDS, available_bytes
    from kerasmem.devices.live import read_machine

    machine = read_machine()
    cards = [(card, available_bytes(card)) for card in CARDS]
    if as_json:
        from kerasmem.rendering.data import to_json

        catalogue = [{**card.to_dict(), "available_bytes": available} for card, available in cards]
        click.echo(to_json({"format_version": 1, "machine": machine.to_dict(), "catalogue": catalogue}))
        return
    from kerasmem.rendering.devices_table import devices_table

    screen = console() if is_terminal() else console(width=400)
    screen.print(devices_table(cards, machine, rich_look=is_terminal(), sources=sources))
