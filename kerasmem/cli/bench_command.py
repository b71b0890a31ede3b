"""`kerasmem bench`: rows of measured memory for the data set."""

from __future__ import annotations

import click

from kerasmem.cli.command import COMMANDS_OF, Command, LazyGroup
from kerasmem.cli.guarded_command import GuardedCommand
from kerasmem.cli.terminal import quiet_tensorflow, show_result, spinner
from kerasmem.cli.vocabulary import all_of, option

COMMANDS = COMMANDS_OF["kerasmem bench"]


@click.group("bench", cls=LazyGroup, lines=COMMANDS, module="bench_command")
def command() -> None:
    """Rows of measured memory: the data set of truth that estimates are held against.

    Examples:
      kerasmem bench contribute --models mnist_cnn,unet
      kerasmem bench check kerasmem-rows.jsonl
    """


@click.command("check", cls=GuardedCommand)
@click.argument("file", type=click.Path())
@all_of("--json")
def check(file: str, as_json: bool) -> int:
    """Say whether every line of FILE is a row of the data set, and what its rows say of the estimates.

    Each problem names the line, the field and the way out. The file is not trusted.

    Examples:
      kerasmem bench check kerasmem-rows.jsonl
      kerasmem bench check scripts/bench/results/estimates.jsonl --json

    Exit codes: 0 every line is a row · 2 a line is not, or the file cannot be read
    """
    from kerasmem.estimation.truth.checking import check_rows
    from kerasmem.rendering.bench_table import check_table

    found = check_rows(file)
    show_result(found, as_json, check_table)
    return 0 if found.is_valid else 2


@click.command("contribute", cls=Command)
@all_of(
    "--models", option("--steps", default=10), "--timeout", option("--output", default="kerasmem-rows.jsonl"), "--json"
)
def contribute(models: str | None, steps: int, timeout: float, output: str, as_json: bool) -> int:
    """Measure some networks on this machine or card, and write rows that you can send in.

    The networks come with kerasmem. Each is trained in graph mode and under XLA in a process of its own, and
    estimated. Nothing is sent, and a row holds no name of a user, a host or a folder. A run that was stopped goes on
    when the same command is given again.

    Examples:
      kerasmem bench contribute
      kerasmem bench contribute --models mnist_cnn,unet --output my-card.jsonl

    Exit codes: 0 all were measured · 1 one was not · 2 wrong usage or unreadable input
    """
    from kerasmem.rendering.bench_table import contribution_table

    names = None if models is None else [name.strip() for name in models.split(",")]
    with quiet_tensorflow(), spinner("measuring") as say:
        from kerasmem.estimation.truth.contributing import contribute as measure_networks

        found = measure_networks(names, output=output, steps=steps, timeout=timeout, progress=say)
    show_result(found, as_json, contribution_table)
    return int(any(row.measured is None for row in found.rows))
