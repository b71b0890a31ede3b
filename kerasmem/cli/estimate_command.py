"""`kerasmem estimate`."""

from __future__ import annotations

import click

from kerasmem.errors import UsageError

_EXIT_CODES = {"fits": 0, "does not fit": 3, "too close to call": 4}
_ROWS_ON_A_SCREEN = 60  # a longer model is shown by its largest layers
_LARGEST = 25

EXAMPLES = """\b
Examples:
  kerasmem estimate model.h5
  kerasmem estimate model.keras --batch-size 64 --device t4
  kerasmem estimate keras.applications:VGG16 --batch-size 128 --device 16GB
  kerasmem estimate mymodels.unet:build --factory-arg depth=5 --json

\b
Exit codes: 0 done (and fits) · 1 the model failed · 2 wrong usage or unreadable
input · 3 does not fit · 4 too close to call"""


@click.command("estimate", epilog=EXAMPLES)
@click.argument("model", required=False)
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Samples in a batch.")
@click.option("--device", help="A card (t4, a100-40, …: `kerasmem devices`) or a size (16GB): adds the verdict.")
@click.option(
    "--input-shape",
    "input_shapes",
    multiple=True,
    metavar="NAME=224,224,3",
    help="An open input, without the batch (ids=128:int32 sets a dtype); repeatable.",
)
@click.option(
    "--method",
    type=click.Choice(["auto", "formula"]),
    default="auto",
    show_default=True,
    help="How to estimate.",
)
@click.option("--mode", type=click.Choice(["train", "inference"]), default="train", show_default=True)
@click.option("--optimizer", help="An optimizer in place of the one the model was compiled with.")
@click.option("--loss", help="The loss, for the record.")
@click.option("--dtype-policy", help="A dtype policy in place of float32, such as mixed_float16.")
@click.option(
    "--factory",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Code that builds the model, where the file does not say how.",
)
@click.option(
    "--factory-arg",
    "factory_args",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument for the function that builds the model; repeatable.",
)
@click.option(
    "--custom-objects",
    multiple=True,
    metavar="PACKAGE.MODULE",
    help="A module with the model's own layers; repeatable.",
)
@click.option("--trust-model", is_flag=True, help="Allow Python code stored in the file to run.")
@click.option(
    "--sort",
    type=click.Choice(["order", "size"]),
    default="order",
    show_default=True,
    help="Layers as called, or largest first.",
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    metavar="N",
    help="List the N largest layers, add up the others (0: all).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a row a layer as CSV.")
def command(
    model: str | None, batch_size: int, device: str | None, input_shapes: tuple[str, ...], method: str, mode: str,
    optimizer: str | None, loss: str | None, dtype_policy: str | None, factory: str | None,
    factory_args: tuple[str, ...], custom_objects: tuple[str, ...], trust_model: bool, sort: str, top: int | None,
    as_json: bool, as_csv: bool,
) -> int:  # fmt: skip
    """Say how much memory training MODEL needs, before it runs and without its weights.

    MODEL is a .h5 or .keras file, an architecture .json, or package.module:function
    (also file.py:function) that returns a Keras model.
    """
    if model is None and factory is None:
        raise UsageError("name a model file, or package.module:function; `kerasmem estimate -h` shows examples")
    if as_json and as_csv:
        raise UsageError("--json and --csv: choose one")
    from kerasmem.cli.terminal import console, is_terminal, quiet_tensorflow
    from kerasmem.devices.catalogue import resolve_device

    if device is not None:
        resolve_device(device)  # a misspelt card is said at once, not after TensorFlow has loaded
    with quiet_tensorflow():
        from kerasmem.estimation.facade import estimate
        from kerasmem.models.inputs import parse_input_shapes
        from kerasmem.models.vocabulary import load_custom_objects, parse_factory_args

        report = estimate(
            model,
            batch_size=batch_size,
            method=method,
            optimizer=optimizer,
            loss=loss,
            dtype_policy=dtype_policy,
            device=device,
            mode=mode,
            input_shape=parse_input_shapes(input_shapes),
            factory=factory,
            factory_args=parse_factory_args(factory_args),
            custom_objects=load_custom_objects(custom_objects),
            trust=trust_model,
        )
    from kerasmem.rendering.data import layers_to_csv, to_json
    from kerasmem.rendering.estimate_table import print_report, render_report

    if as_json:
        click.echo(to_json(report.to_dict()))
    elif as_csv:
        click.echo(layers_to_csv(report), nl=False)
    elif is_terminal():
        if top is None and sort == "order" and len(report.layers) > _ROWS_ON_A_SCREEN:
            top = _LARGEST
        print_report(report, console(), sort=sort, top=top)
    else:
        click.echo(render_report(report, sort=sort, top=top), nl=False)
    return 0 if report.device is None else _EXIT_CODES[report.device.verdict]
