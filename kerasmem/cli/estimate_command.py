"""`kerasmem estimate`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.model_options import (
    cache_option,
    call_arguments,
    check_options,
    method_option,
    model_options,
    show_report,
)

EXAMPLES = """\b
Examples:
  kerasmem estimate model.h5
  kerasmem estimate model.keras --batch-size 64 --device t4
  kerasmem estimate keras.applications:VGG16 --batch-size 128 --device 16GB
  kerasmem estimate model.keras --method graph --optimizer adam --top 10
  kerasmem estimate mymodels.unet:build --factory-arg depth=5 --json
  kerasmem estimate model.keras --batch-size 256 --replicas 4 --shard-optimizer
  kerasmem estimate model.keras --replicas 4 --parallel model --layout '.*/kernel=,model'

\b
Exit codes: 0 done (and fits) · 1 the model failed · 2 wrong usage or unreadable
input · 3 does not fit · 4 too close to call"""


@click.command("estimate", epilog=EXAMPLES)
@model_options(
    method_option,
    cache_option,
    click.option(
        "--replicas",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Devices that train together; the answer is for one of them.",
    ),
    click.option(
        "--parallel",
        type=click.Choice(["data", "model"]),
        default="data",
        show_default=True,
        help="What replicas divide: each batch, or the weights (Keras on JAX).",
    ),
    click.option("--shard-optimizer", is_flag=True, help="Replicas divide the optimizer's slots too (Keras on JAX)."),
    click.option(
        "--layout",
        "layouts",
        multiple=True,
        metavar="REGEX=,model",
        help="With --parallel model: the dimension to divide of variables with such a path; repeatable.",
    ),
)
def command(
    model: str | None, method: str, no_cache: bool, replicas: int, parallel: str, shard_optimizer: bool,
    layouts: tuple[str, ...], **options: Any,
) -> int:  # fmt: skip
    """Say how much memory training MODEL needs, before it runs and without its weights.

    MODEL is a .h5 or .keras file, an architecture .json, or package.module:function
    (also file.py:function) that returns a Keras model.
    """
    check_options("estimate", model, options)
    from kerasmem.estimation.parallel.asking import check_method
    from kerasmem.estimation.parallel.parallelism import parallelism

    check_method(method, parallelism(replicas, parallel, shard_optimizer, layouts))
    from kerasmem.cli.terminal import quiet_tensorflow, working

    with quiet_tensorflow(), working(f"estimating {model or options['factory']}", method):
        from kerasmem.estimation.cache import cached_estimate
        from kerasmem.estimation.facade import estimate

        ask = estimate if no_cache else cached_estimate
        report = ask(
            model, method=method, replicas=replicas, parallel=parallel, shard_optimizer=shard_optimizer,
            layout=list(layouts) or None, **call_arguments(options),
        )  # fmt: skip
    return show_report(report, options)
