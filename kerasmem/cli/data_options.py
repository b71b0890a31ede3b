"""Options that `kerasmem data convert` and `kerasmem data repack` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from kerasmem.errors import UsageError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def write_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how a file is written."""
    options = (
        click.option("-o", "--output", required=True, metavar="FILE", help="The HDF5 file to write."),
        click.option(
            "--columns",
            multiple=True,
            metavar="NAME=COLUMN,...",
            help="Write dataset NAME from these columns, side by side; names, patterns, or * for the rest.",
        ),
        click.option("--drop", multiple=True, metavar="COLUMN", help="Leave columns out; a name or a pattern."),
        click.option(
            "--batch-size",
            type=click.IntRange(min=1),
            default=32,
            show_default=True,
            help="Rows a batch, for the chunks.",
        ),
        click.option("--shuffle", is_flag=True, help="Write the rows in random order."),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is random."),
        click.option(
            "--compression",
            default="none",
            show_default=True,
            metavar="KIND",
            help="none, gzip, zstd; or gzip:1 to gzip:9.",
        ),
        click.option("--allow-external", is_flag=True, help="Read other files that an HDF5 file names."),
        click.option("--memory", default="512MiB", show_default=True, metavar="SIZE", help="To work in."),
        click.option("--verify", is_flag=True, help="Read the result back before it is moved into place."),
        click.option("--force", is_flag=True, help="Overwrite FILE, and discard interrupted work of other settings."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def read_columns(texts: Sequence[str]) -> dict[str, list[str]] | None:
    """Return what --columns says, by name of the dataset.

    Raises:
        UsageError: a text is no NAME=COLUMN,...
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, columns = text.partition("=")
        if not equals or not name or not all(columns.split(",")):
            raise UsageError(f"--columns: {text!r} is not NAME=COLUMN,COLUMN; write for example x='pixel*' or y=label")
        if name in found:
            raise UsageError(f"--columns: {name!r} is given twice; list its columns in one option")
        found[name] = columns.split(",")
    return found or None
