"""What commands share: options of models, files and output, what they come to as arguments, exit codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from kerasmem.checks import MOST_SAMPLES, Method, Mode, nearest, whole
from kerasmem.cli.command import Decorator, option
from kerasmem.errors import UsageError

EXIT_CODES = {
    "fits": 0, "within the limit": 0, "does not fit": 3, "exceeds the limit": 3, "too close to call": 4,
}  # fmt: skip
_SEVERITY = (0, 4, 3)


class Choice(click.Choice[str]):
    """One of some words; the message about another names the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return what is said of a word that is none of them."""
        return super().get_invalid_choice_message(value, ctx).rstrip(".") + (nearest(value, self.choices) or ".")


class Count(click.IntRange):
    """A whole number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number that a text says."""
        try:
            int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


class Suggested(StringParamType):
    """A text for which the shell offers some words.

    Args:
        name: what it is.
        words: returns the words; called when they are asked for.
    """

    def __init__(self, name: str, words: Callable[[], Iterable[str]]) -> None:
        self.name, self._words = name, words

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the words that begin with what was typed."""
        return [CompletionItem(word) for word in self._words() if word.startswith(incomplete.lower())]


def _card_keys() -> list[str]:
    from kerasmem.devices.cards import all_cards

    return [card.key for card in all_cards()]


def _optimizers() -> list[str]:
    from kerasmem.models.names import optimizer_names

    return sorted(optimizer_names())


def choice_option(*names: str, choices: Any, help: str, **options: Any) -> Decorator:
    """Return an option that takes one of some words, the first where it is not given.

    Args:
        *names: of the option.
        choices: a `Literal` type.
        help: its sentence.
        **options: as for `Option`.
    """
    words = get_args(choices)
    return option(*names, type=Choice(words), help=help, **{"default": words[0], **options})


def repeatable_option(*names: str, metavar: str, help: str, **options: Any) -> Decorator:
    """Return an option that may be given several times."""
    return option(*names, multiple=True, metavar=metavar, help=help, **{"show_default": "none", **options})


COUNT, WHOLE = Count(min=1), Count(min=0)
SECONDS = click.FloatRange(min=0, min_open=True)
FILE_TO_WRITE = click.Path(dir_okay=False)
of_model, of_step, of_output, of_limits, of_hdf5 = (
    partial(option, panel=panel) for panel in ("Model", "Training step", "Output", "Limits", "HDF5 files")
)

# Each option that several commands have is described once; what differs is its default.
json_option: Decorator = of_output("--json", "as_json", is_flag=True, help="Print the result as JSON, for programs.")
verbose_option: Decorator = of_output("-v", "--verbose", is_flag=True, help="Show everything that is known.")
batch_size_option: Decorator = option(
    "-b", "--batch-size", type=COUNT, default=32, metavar="N", help="Take N samples a batch."
)
method_option: Decorator = choice_option(
    "-m",
    "--method",
    choices=Method,
    help="Estimate by this method; auto takes the one that fits how Keras would train. graph is for the card of "
    "--device where it names one.",
)
cache_option: Decorator = of_limits(
    "--cache/--no-cache",
    default=True,
    help="Use answers that were kept, and keep new ones (KERASMEM_CACHE=off: never).",
)
timeout_option = partial(
    of_limits, "--timeout", type=SECONDS, metavar="SECONDS", default=600,
    help="Give up on a process that runs TensorFlow after so many seconds.",
)  # fmt: skip
steps_option = partial(option, "--steps", type=COUNT, metavar="N", help="Run N real training steps.")
output_option = partial(
    of_output, "-o", "--output", type=FILE_TO_WRITE, metavar="FILE", help="Write the result to FILE."
)
memory_budget_option = partial(
    of_limits, "--memory-budget", metavar="SIZE", help="Work in so much of the host's memory."
)
verify_option: Decorator = option(
    "--verify", is_flag=True, help="Read all data, and compare it with the checksums of what was written."
)


def sort_option(default: str | None = None) -> Decorator:
    """Return the option for the order of layers.

    Args:
        default: None where it is the largest first, and with `-v` the model's order.
    """
    shown = {"show_default": "size; with -v order"} if default is None else {}
    words = Choice(["order", "size"])
    text = "List layers in the model's order, or the largest first."
    return of_output("--sort", type=words, default=default, help=text, **shown)


def top_option(shown: str) -> Decorator:
    """Return the option for the number of layers, with what help says of its default."""
    return of_output(
        "--top", type=WHOLE, metavar="N", show_default=shown, help="List N layers, the largest first; 0 lists all."
    )


ONE_MODEL: tuple[Decorator, ...] = (click.argument("model", required=False),)


def _choose_backend(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Choose Keras's backend before anything loads Keras."""
    if value is not None:
        os.environ["KERAS_BACKEND"] = value


_MODEL: tuple[Decorator, ...] = (
    option(
        "--backend", type=Choice(["tensorflow", "jax"]), callback=_choose_backend, expose_value=False, is_eager=True,
        show_default="as KERAS_BACKEND or keras.json says", help="Have Keras run on TensorFlow or on JAX.",
    ),
    batch_size_option,
    option(
        "-d", "--device", type=Suggested("device", _card_keys), metavar="CARD|SIZE", show_default="none",
        help="Judge whether it fits a card (t4, a100-40; `kerasmem devices` lists them) or a size (16GB).",
    ),
)  # fmt: skip
_STEP: tuple[Decorator, ...] = (
    choice_option(
        "--mode", choices=Mode, panel="Training step", help="Take a step of training, evaluation or inference."
    ),
    of_step(
        "--jit-compile/--no-jit-compile", default=None, former="--xla/--no-xla", show_default="as Keras decides",
        help="Have XLA compile the step, or not.",
    ),
    of_step(
        "--optimizer", type=Suggested("name", _optimizers), show_default="the one stored with the model, else adam",
        help="Train with this optimizer.",
    ),
    of_step("--loss", metavar="NAME", show_default="the one stored with the model", help="Train with this loss."),
    of_step(
        "--dtype-policy", metavar="NAME", show_default="float32",
        help="Compute by this dtype policy, such as mixed_float16.",
    ),
    repeatable_option(
        "--target-shape", metavar="[NAME=]10", panel="Training step", show_default="as the loss tells",
        help="Set the shape of a target without the batch, or none; repeatable.",
    ),
    of_step(
        "--target-dtype", metavar="DTYPE", show_default="as the loss tells", help="Set the dtype of the targets."
    ),
    repeatable_option(
        "--input-shape", metavar="[NAME=]224,224,3", panel="Model", show_default="as the model says",
        help="Set the open sizes of an input without the batch; ids=128:int32 sets a dtype too; repeatable.",
    ),
    of_model(
        "--factory", metavar="MODULE:FUNCTION", show_default="none",
        help="Build the model with this function, where the file does not say how.",
    ),
    repeatable_option(
        "--factory-arg", "factory_args", metavar="NAME=VALUE", panel="Model",
        help="Give the function that builds the model an argument; repeatable.",
    ),
    repeatable_option(
        "--custom-objects", metavar="MODULE", panel="Model",
        help="Take the model's own layers from this module; repeatable.",
    ),
    of_model(
        "--trust", is_flag=True, former="--trust-model", help="Allow Python code that is stored in the file to run."
    ),
)  # fmt: skip
_OUTPUT: tuple[Decorator, ...] = (
    verbose_option,
    sort_option(),
    top_option("8; with -v all"),
    json_option,
    of_output("--csv", "as_csv", is_flag=True, help="Print the layers as CSV."),
)

# What of an HDF5 file is trusted.
TRUST: tuple[Decorator, ...] = (
    of_hdf5("--allow-external", is_flag=True, help="Read other files that an HDF5 file names."),
    of_hdf5("--allow-hdf5-filters", is_flag=True, help="Have HDF5 undo filters that kerasmem cannot, unchecked."),
)
# The datasets of a file that are features and targets, and how much is read at once.
FILE: tuple[Decorator, ...] = (
    click.argument("file", type=click.Path()),
    option("--x", metavar="NAME", show_default="what looks most like it", help="Take this dataset for the features."),
    option("--y", metavar="NAME", show_default="what looks most like it", help="Take this dataset for the targets."),
    batch_size_option,
)
# How a file is written.
WRITING: tuple[Decorator, ...] = (
    output_option(required=True),
    repeatable_option(
        "--columns",
        metavar="NAME=COLUMN,...",
        show_default="all",
        help="Write dataset NAME from these columns, side by side: names, patterns, or * for the rest.",
    ),
    repeatable_option("--drop", metavar="COLUMN", help="Leave out columns by name or pattern."),
    batch_size_option,
    option("--shuffle", is_flag=True, help="Write the rows in random order."),
    option("--seed", type=WHOLE, default=0, metavar="N", help="Draw everything random from this seed."),
    option(
        "--compression",
        default="none",
        metavar="KIND",
        help="Compress with gzip or zstd; gzip:1 to gzip:9 set a level.",
    ),
    verify_option,
    option("--force", is_flag=True, help="Overwrite FILE, and discard interrupted work of other settings."),
    *TRUST,
    memory_budget_option(default="512MiB", former="--memory"),
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
    return all_of(*arguments, *_MODEL, *own, *_STEP, *output)


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
    whole("--batch-size", options["batch_size"], most=MOST_SAMPLES)
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

    same = ("batch_size", "optimizer", "loss", "target_dtype", "dtype_policy", "device", "mode", "factory", "trust")
    return {
        **{name: options[name] for name in same},
        "input_shape": parse_input_shapes(options["input_shape"]),
        "target_shape": list(options["target_shape"]) or None,
        "factory_args": parse_factory_args(options["factory_args"]),
        "custom_objects": load_custom_objects(options["custom_objects"]) if options["custom_objects"] else None,
        "jit_compile": "auto" if options["jit_compile"] is None else options["jit_compile"],
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
