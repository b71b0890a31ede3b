"""What commands share: options of models, files and output, what they come to as arguments, exit codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from kerasmem.checks import nearest
from kerasmem.errors import UsageError

EXIT_CODES = {
    "fits": 0, "within the limit": 0, "does not fit": 3, "exceeds the limit": 3, "too close to call": 4,
}  # fmt: skip
_SEVERITY = (0, 4, 3)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Choice(click.Choice[str]):
    """One of some words; the message about another names the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return what is said of a word that is none of them."""
        return super().get_invalid_choice_message(value, ctx).rstrip(".") + (nearest(value, self.choices) or ".")


def choice_option(name: str, choices: Sequence[str], help: str, short: str | None = None) -> Decorator:
    """Return an option that takes one of some words, the first where it is not given."""
    return click.option(*([] if short is None else [short]), name, type=Choice(choices), default=choices[0], help=help)


def repeatable_option(*names: str, metavar: str, help: str) -> Decorator:
    """Return an option that may be given several times."""
    return click.option(*names, multiple=True, metavar=metavar, help=help)


METHODS = ("auto", "formula", "graph", "xla", "gpu-target", "probe")
COUNT = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0, min_open=True)
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
# What of an HDF5 file is trusted.
TRUST: tuple[Decorator, ...] = (
    click.option("--allow-external", is_flag=True, help="Read other files that an HDF5 file names."),
    click.option("--allow-hdf5-filters", is_flag=True, help="Have HDF5 undo filters that kerasmem cannot, unchecked."),
)
ONE_MODEL: tuple[Decorator, ...] = (click.argument("model", required=False),)
method_option: Decorator = choice_option(
    "--method", METHODS, "How to estimate; auto: as Keras would run the step.", "-m"
)
cache_option: Decorator = click.option(
    "--no-cache", is_flag=True, help="Compute again what was answered before (KERASMEM_CACHE=off: always)."
)

timeout_option: Decorator = click.option(
    "--timeout", type=SECONDS, default=600, metavar="SECONDS", help="Give up real steps after so long."
)

TOP_HELP = "List the N largest layers, add up the others (0: all)."
batch_size_option: Decorator = click.option("-b", "--batch-size", type=COUNT, default=32, help="Rows a batch.")
_MODEL: tuple[Decorator, ...] = (
    click.option("-b", "--batch-size", type=COUNT, default=32, help="Samples in a batch."),
    click.option(
        "-d", "--device", help="A card (t4, a100-40, …: `kerasmem devices`) or a size (16GB): adds the verdict."
    ),
    repeatable_option(
        "--input-shape",
        "input_shapes",
        metavar="NAME=224,224,3",
        help="An open input, without the batch (ids=128:int32 sets a dtype); repeatable.",
    ),
)
_TRAINING: tuple[Decorator, ...] = (
    click.option("--mode", type=Choice(["train", "evaluate", "inference"]), default="train"),
    click.option("--xla/--no-xla", "xla", default=None, help="Compiled by XLA or not [default: as Keras decides]."),
    click.option("--optimizer", help="An optimizer in place of the one the model was compiled with."),
    repeatable_option(
        "--target-shape",
        "target_shapes",
        metavar="10",
        help="The targets' shape without the batch, or none, where the loss cannot tell; repeatable with NAME=.",
    ),
    click.option("--target-dtype", help="The targets' dtype, where the loss cannot tell."),
    click.option("--loss", help="A loss in place of the one the model was compiled with."),
    click.option("--dtype-policy", help="A dtype policy in place of float32, such as mixed_float16."),
    click.option(
        "--factory",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="Code that builds the model, where the file does not say how.",
    ),
    repeatable_option(
        "--factory-arg",
        "factory_args",
        metavar="NAME=VALUE",
        help="An argument for the function that builds the model; repeatable.",
    ),
    repeatable_option(
        "--custom-objects", metavar="PACKAGE.MODULE", help="A module with the model's own layers; repeatable."
    ),
    click.option("--trust-model", is_flag=True, help="Allow Python code stored in the file to run."),
)
_OUTPUT: tuple[Decorator, ...] = (
    click.option(
        "-v", "--verbose", is_flag=True, help="Show all: categories in bytes, the formula, other methods, notes."
    ),
    choice_option("--sort", ["order", "size"], "Layers as called, or largest first."),
    click.option("--top", type=click.IntRange(min=0), metavar="N", help=TOP_HELP),
    json_option,
    click.option("--csv", "as_csv", is_flag=True, help="Print a row a layer as CSV."),
)


# The datasets of a file that are features and targets, and how much is read at once.
FILE: tuple[Decorator, ...] = (
    click.argument("file", type=click.Path()),
    click.option("--x", metavar="NAME", help="The dataset of the features [default: what looks most like them]."),
    click.option("--y", metavar="NAME", help="That of the targets [default: the same]."),
    batch_size_option,
)
# How a file is written.
WRITING: tuple[Decorator, ...] = (
    click.option("-o", "--output", required=True, metavar="FILE", help="The HDF5 file to write."),
    repeatable_option(
        "--columns",
        metavar="NAME=COLUMN,...",
        help="Write dataset NAME from these columns, side by side; names, patterns, or * for the rest.",
    ),
    repeatable_option("--drop", metavar="COLUMN", help="Leave columns out; a name or a pattern."),
    click.option("-b", "--batch-size", type=COUNT, default=32, help="Rows a batch, for the chunks."),
    click.option("--shuffle", is_flag=True, help="Write the rows in random order."),
    click.option("--seed", type=click.IntRange(min=0), default=0, help="Of what is random."),
    click.option("--compression", default="none", metavar="KIND", help="none, gzip, zstd; or gzip:1 to gzip:9."),
    *TRUST,
    click.option("--memory", default="512MiB", metavar="SIZE", help="To work in."),
    click.option("--verify", is_flag=True, help="Read the result back before it is moved into place."),
    click.option("--force", is_flag=True, help="Overwrite FILE, and discard interrupted work of other settings."),
    json_option,
)


def all_of(*options: Decorator) -> Decorator:
    """Return a decorator that adds several options, which help shows in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(options):
            function = each(function)
        return function

    return decorate


def model_options(
    *own: Decorator, arguments: tuple[Decorator, ...] = ONE_MODEL, output: tuple[Decorator, ...] = _OUTPUT
) -> Decorator:
    """Return a decorator that adds the shared options, with the command's own between the model's and training's.

    Args:
        *own: options of the command.
        arguments: what it takes without a name.
        output: the options for what it prints.
    """
    return all_of(*arguments, *_MODEL, *own, *_TRAINING, *output)


def check_options(command: str, model: str | None, options: dict[str, Any]) -> None:
    """Refuse what can be refused before TensorFlow is loaded.

    Raises:
        ModelFileError: there is no such file.
        UsageError: no model is named, two outputs are asked for, or there is no such function, card or optimizer.
    """
    from kerasmem.devices.catalogue import resolve_device
    from kerasmem.models.names import check_factory_name, check_model_name, check_optimizer_name

    if model is None and options["factory"] is None:
        raise UsageError(f"name a model file, or package.module:function; `kerasmem {command} -h` shows examples")
    if options["as_json"] and options.get("as_csv"):
        raise UsageError("--json and --csv: choose one")
    if options["device"] is not None:
        resolve_device(options["device"])
    if options["optimizer"] is not None:
        check_optimizer_name(options["optimizer"])
    if model is not None:
        check_model_name(model)
    if options["factory"] is not None:
        check_factory_name(options["factory"], "--factory")


def call_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the shared options as `kerasmem.estimate` takes them; loads Keras."""
    from kerasmem.models.inputs import parse_input_shapes
    from kerasmem.models.vocabulary import load_custom_objects, parse_factory_args

    same = ("batch_size", "optimizer", "loss", "target_dtype", "dtype_policy", "device", "mode", "factory")
    return {
        **{name: options[name] for name in same},
        "input_shape": parse_input_shapes(options["input_shapes"]),
        "target_shape": list(options["target_shapes"]) or None,
        "factory_args": parse_factory_args(options["factory_args"]),
        "custom_objects": load_custom_objects(options["custom_objects"]) if options["custom_objects"] else None,
        "trust": options["trust_model"],
        "jit_compile": "auto" if options["xla"] is None else options["xla"],
    }


def worst(verdicts: Iterable[str]) -> int:
    """Return the exit code of the worst of some verdicts: does not fit, too close to call, fits."""
    return max((EXIT_CODES[each] for each in verdicts), key=_SEVERITY.index, default=0)


def require_device(options: dict[str, Any]) -> None:
    """Refuse a command that needs a device and was given none."""
    if options["device"] is None:
        raise UsageError("name the device that it must fit: --device t4, or a size such as --device 16GB")


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
