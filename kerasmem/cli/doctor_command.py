"""`kerasmem doctor`."""

from __future__ import annotations

import click

EXAMPLES = """\b
Examples:
  kerasmem doctor
  CUDA_VISIBLE_DEVICES=1 kerasmem doctor
  kerasmem doctor --json"""


@click.command("doctor", epilog=EXAMPLES)
@click.option("--timeout", default=120.0, show_default=True, help="Seconds that TensorFlow gets.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(timeout: float, as_json: bool) -> int:
    """Say whether TensorFlow sees the GPU, and why not; what decides about memory here.

    TensorFlow runs in a process of its own, so that its crash is reported too. Exit codes: 0 it runs, on whatever
    device; 1 it does not.
    """
    from kerasmem.cli.terminal import console, is_terminal
    from kerasmem.devices.doctor import examine

    found = examine(timeout=timeout)
    if as_json:
        from kerasmem.rendering.data import to_json

        click.echo(to_json(found.to_dict()))
    else:
        from kerasmem.rendering.doctor_table import doctor_table

        screen = console() if is_terminal() else console(width=400)
        screen.print(doctor_table(found, rich_look=is_terminal()))
    return 0 if found.works else 1
