"""What commands about a model share: the options that name it and its training, and how a report is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from kerasmem.errors import UsageError

EXIT_CODES = {
    "fits": 0, "within the limit": 0, "does not fit": 3, "exceeds the limit": 3, "too close to call": 4,
}  # fmt: skip
_SEVERITY = (0, 4, 3)
_ROWS_ON_A_SCREEN = 60  # a longer model is shown by its largest layers
_LARGEST = 25

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

METHODS = ("auto", "formula", "graph", "xla", "gpu-target", "probe")
ONE_MODEL: tuple[Decorator, ...] = (click.argument("model", required=False),)
method_option: Decorator = click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="How to estimate; auto: as Keras would run the step.",
)
cache_option: Decorator = click.option(
    "--no-cache", is_flag=True, help="Compute anew what was answered before (KERASMEM_CACHE=off: always)."
)

timeout_option: Decorator = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Give up real steps after so long.",
)

_MODEL: tuple[Decorator, ...] = (
    click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Samples in a batch."),
    click.option("--device", help="A card (t4, a100-40, …: `kerasmem devices`) or a size (16GB): adds the verdict."),
    click.option(
        "--input-shape",
        "input_shapes",
        multiple=True,
        metavar="NAME=224,224,3",
        help="An open input, without the batch (ids=128:int32 sets a dtype); repeatable.",
    ),
)
_TRAINING: tuple[Decorator, ...] = (
    click.option("--mode", type=click.Choice(["train", "evaluate", "inference"]), default="train", show_default=True),
    click.option("--xla/--no-xla", "xla", default=None, help="Compiled by XLA or not [default: as Keras decides]."),
    click.option("--optimizer", help="An optimizer in place of the one the model was compiled with."),
    click.option("--loss", help="A loss in place of the one the model was compiled with."),
    click.option("--dtype-policy", help="A dtype policy in place of float32, such as mixed_float16."),
    click.option(
        "--factory",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="Code that builds the model, where the file does not say how.",
    ),
    click.option(
        "--factory-arg",
        "factory_args",
        multiple=True,
        metavar="NAME=VALUE",
        help="An argument for the function that builds the model; repeatable.",
    ),
    click.option(
        "--custom-objects",
        multiple=True,
        metavar="PACKAGE.MODULE",
        help="A module with the model's own layers; repeatable.",
    ),
    click.option("--trust-model", is_flag=True, help="Allow Python code stored in the file to run."),
)
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_OUTPUT: tuple[Decorator, ...] = (
    click.option(
        "--sort",
        type=click.Choice(["order", "size"]),
        default="order",
        show_default=True,
        help="Layers as called, or largest first.",
    ),
    click.option(
        "--top",
        type=click.IntRange(min=0),
        metavar="N",
        help="List the N largest layers, add up the others (0: all).",
    ),
    json_option,
    click.option("--csv", "as_csv", is_flag=True, help="Print a row a layer as CSV."),
)


def model_options(
    *own: Decorator, arguments: tuple[Decorator, ...] = ONE_MODEL, output: tuple[Decorator, ...] = _OUTPUT
) -> Decorator:
    """Return a decorator that adds the shared options, with the command's own between the model's and training's.

    Args:
        *own: options of the command.
        arguments: what it takes without a name.
        output: the options for what it prints.
    """
    order = (*arguments, *_MODEL, *own, *_TRAINING, *output)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(order):
            function = each(function)
        return function

    return decorate


def check_options(command: str, model: str | None, options: dict[str, Any]) -> None:
    """Refuse what can be refused before TensorFlow is loaded.

    Raises:
        UsageError: no model is named, two outputs are asked for, or there is no such card.
    """
    from kerasmem.devices.catalogue import resolve_device

    if model is None and options["factory"] is None:
        raise UsageError(f"name a model file, or package.module:function; `kerasmem {command} -h` shows examples")
    if options["as_json"] and options.get("as_csv"):
        raise UsageError("--json and --csv: choose one")
    if options["device"] is not None:
        resolve_device(options["device"])


def call_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the shared options as `kerasmem.estimate` takes them; loads Keras."""
    from kerasmem.models.inputs import parse_input_shapes
    from kerasmem.models.vocabulary import load_custom_objects, parse_factory_args

    same = ("batch_size", "optimizer", "loss", "dtype_policy", "device", "mode", "factory")
    return {
        **{name: options[name] for name in same},
        "input_shape": parse_input_shapes(options["input_shapes"]),
        "factory_args": parse_factory_args(options["factory_args"]),
        "custom_objects": load_custom_objects(options["custom_objects"]) if options["custom_objects"] else None,
        "trust": options["trust_model"],
        "jit_compile": "auto" if options["xla"] is None else options["xla"],
    }


def worst(verdicts: Iterable[str]) -> int:
    """Return the exit code of the worst of some verdicts: does not fit, too close to call, fits."""
    return max((EXIT_CODES[each] for each in verdicts), key=_SEVERITY.index, default=0)


def show_report(report: Any, options: dict[str, Any]) -> int:
    """Print a `MemoryReport` as the options say, and return the exit code."""
    from kerasmem.cli.terminal import console, is_terminal
    from kerasmem.rendering.data import layers_to_csv, to_json
    from kerasmem.rendering.estimate_table import print_report, render_report

    sort, top = options["sort"], options["top"]
    if options["as_json"]:
        click.echo(to_json(report.to_dict()))
    elif options["as_csv"]:
        click.echo(layers_to_csv(report), nl=False)
    elif is_terminal():
        if top is None and sort == "order" and len(report.layers) > _ROWS_ON_A_SCREEN:
            top = _LARGEST
        print_report(report, console(), sort=sort, top=top)
    else:
        click.echo(render_report(report, sort=sort, top=top), nl=False)
    return 0 if report.device is None else EXIT_CODES[report.device.verdict]
