"""`kerasmem estimate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.options import EXIT_CODES, PROFILE, check_options, model_options, read_lists, step_settings, worst
from kerasmem.cli.terminal import progress_bar, quiet_tensorflow, show_result, show_text, spinner
from kerasmem.files import read_json


def _is_many(options: Mapping[str, Any]) -> bool:
    return len(options["models"]) > 1 or bool(options["grid"] or options["workers"] or options["dask"])


@click.command("estimate", cls=GuardedCommand, parted=_is_many)
@model_options(
    "--grid", "--workers", "--dask", "--method", "--replicas", *PROFILE,
    arguments=(click.argument("models", metavar="MODEL...", nargs=-1),),
)  # fmt: skip
def estimate_command(
    models: tuple[str, ...], grid: tuple[str, ...], workers: int | None, dask: str | None, limits: Any,
    **options: Any,
) -> int:  # fmt: skip
    """Estimate the memory that training MODEL needs, without running it or allocating its weights.

    MODEL is a .h5 or .keras file, an architecture .json, or package.module:function (also file.py:function) that
    returns a Keras model.

    With several models or --grid, each estimate is a row of a table, of CSV, or with --json a line of JSON, printed as
    soon as it is ready. A failed estimate is a row with the reason. Limits of time and memory apply to each row.

    Examples:
      kerasmem estimate model.h5
      kerasmem estimate model.keras -b 64 -d t4
      kerasmem estimate keras.applications:VGG16 --batch-size 128 --device 16GB
      kerasmem estimate model.keras --method graph --optimizer adam --top 10
      kerasmem estimate mymodels.unet:build --factory-arg depth=5 --json
      kerasmem estimate model.keras --batch-size 256 --replicas 4
      kerasmem estimate models/*.h5 --grid batch_size=16,32,64 -d t4
      kerasmem estimate unet.py:build --grid depth=3,4,5 --grid optimizer=sgd,adam --workers 4

    Exit codes: 0 done (and fits) · 1 a model failed · 2 wrong usage or unreadable
    input · 3 does not fit · 4 too close to call
    """
    if limits is not None:
        from kerasmem.processes.executors import open_executor

        with open_executor(workers, dask) as executor:
            return _estimate_many(models, _read_grid(grid), executor, limits, options)
    model = models[0] if models else None
    check_options("estimate", model, options)
    with quiet_tensorflow(), spinner(f"estimating {model or options['factory']}"):
        from kerasmem.estimation.estimating import estimate

        report = estimate(model, **step_settings(options))
    return show_report(report, options)


def show_report(report: Any, options: dict[str, Any]) -> int:
    """Print a `MemoryReport` in the format of the options, and return the exit code."""
    from kerasmem.estimation.report import fitting_cards
    from kerasmem.rendering.estimate_tables import estimate_table, layers_to_csv

    if options["as_csv"]:
        click.echo(layers_to_csv(report), nl=False)
    else:
        cards = fitting_cards(report.bytes) if report.device is None else []
        settings = {"cards": cards, "top": options["top"], "is_brief": not options["verbose"]}
        show_result(report, options["as_json"], partial(estimate_table, **settings))
    return 0 if report.device is None else EXIT_CODES[report.device.verdict]


def _estimate_many(
    models: Sequence[str], grid: Mapping[str, list[Any]], executor: Any, limits: Any, options: dict[str, Any]
) -> int:
    if not models and options["factory"] is not None:
        models, options = [options["factory"]], {**options, "factory": None}
    names: Sequence[str | None] = models or [None]
    for name in names:
        check_options("estimate", name, options)
    from kerasmem.estimation.many import estimate_many
    from kerasmem.rendering.formatting import rows_to_csv
    from kerasmem.rendering.search_tables import many_table

    with progress_bar() as show:

        def progress(row: Any, done: int, count: int) -> None:
            if options["as_json"]:
                click.echo(json.dumps(row.to_dict(), allow_nan=False))
            if show is not None:
                show(row.model, done, count)

        table = estimate_many(
            models, grid=grid, executor=executor, timeout=limits.seconds, host_memory_limit=limits.host_bytes,
            progress=progress, **step_settings(options),
        )  # fmt: skip
    candidates = table.candidates
    if options["as_csv"]:
        click.echo(rows_to_csv([candidate.row() for candidate in candidates]), nl=False)
    elif not options["as_json"]:
        show_text(lambda terminal: many_table(table, terminal, top=options["top"]))
    if table.failed:
        return 1
    return worst(candidate.verdict for candidate in candidates if candidate.verdict is not None)


def _read_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read grids such as "batch_size=16,32". Values are JSON if possible, else text."""
    grid: dict[str, list[Any]] = {}
    for name, values in read_lists("--grid", texts, "batch_size=16,32,64").items():
        try:
            grid[name] = read_json(f"[{values}]")
        except ValueError:
            grid[name] = [_value(text) for text in values.split(",")]
    return grid


def _value(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return text
