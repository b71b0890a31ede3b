"""`kerasmem completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kerasmem.cli.command import Command
from kerasmem.cli.vocabulary import Choice

_VARIABLE = "_KERASMEM_COMPLETE"  # by which the shell asks for words


@click.command("completion", cls=Command)
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print what makes SHELL (bash, zsh or fish) complete commands, options, cards, methods and optimizers.

    Examples:
      eval "$(kerasmem completion bash)"   # in ~/.bashrc
      eval "$(kerasmem completion zsh)"    # in ~/.zshrc
      kerasmem completion fish | source    # in ~/.config/fish/config.fish
    """
    shells = get_completion_class(shell)
    assert shells is not None
    script = shells(context.find_root().command, {}, "kerasmem", _VARIABLE)
    click.echo(script.source_template % script.source_vars())
