"""Options of the commands, described in `data/vocabulary.json`: panel → name → settings.

`short` and `off` are other spellings of the option, `name` is its name in Python if it differs, and `type` is a key of
`_TYPES`. The other settings are arguments of `click.Option`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import click

from kerasmem.checks import Color, Decimal, MethodName, Mode, RowsAxis, batch_size, nearest
from kerasmem.errors import UsageError
from kerasmem.files import package_data, read_json

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
FIRST = "Options"  # panel of a command's own options
EXIT_CODES = {
    "fits": 0, "within the limit": 0, "does not fit": 3, "exceeds the limit": 3, "too close to call": 4,
}  # fmt: skip
_SEVERITY = (0, 4, 3)


class Choice(click.Choice[str]):
    """A choice that suggests the nearest word on an error."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Add the nearest word to the error."""
        return super().get_invalid_choice_message(value, ctx).rstrip(".") + (nearest(value, self.choices) or ".")


class Range(click.FloatRange):
    """A range of numbers without NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number, or fail."""
        number = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is not a number", param, ctx) if number != number else number


_TYPES: dict[str, Any] = {
    "count": click.IntRange(min=1),
    "whole": click.IntRange(min=0),
    "seconds": Range(min=0, min_open=True),
    "seconds or 0": Range(min=0),
    "share": Range(0, 1, max_open=True),
    "file": click.Path(),
    "output": click.Path(dir_okay=False),
    "folder": click.Path(file_okay=False),
    "method": Choice(get_args(MethodName)),
    "mode": Choice(get_args(Mode)),
    "kernels": Choice(["onednn", "eigen"]),
    "backend": Choice(["tensorflow", "jax"]),
    "color": Choice(get_args(Color)),
    "decimal": Choice(get_args(Decimal)),
    "rows axis": Choice(get_args(RowsAxis)),
}
_METAVARS = {"count": "N", "whole": "N", "seconds": "SECONDS", "output": "FILE", "folder": "FOLDER"}
_VOCABULARY: dict[str, tuple[str, dict[str, Any]]] = {
    name: (panel, settings)
    for panel, options in package_data(__package__, "vocabulary").items()
    for name, settings in options.items()
}


class Option(click.Option):
    """An option in a panel of the help.

    Args:
        *names: arguments of `click.Option`.
        panel: heading of the panel.
        **options: keyword arguments of `click.Option`.
    """

    def __init__(self, *names: Any, panel: str = FIRST, **options: Any) -> None:
        super().__init__(*names, **options)
        self.panel = panel


def make_option(name: str, **more: Any) -> Option:
    """Create an option of the vocabulary.

    Args:
        name: long name of the option.
        **more: settings for one command, such as the default.
    """
    panel, shared = _VOCABULARY[name]
    settings = {**shared, **more}
    kind, off = settings.pop("type", None), settings.pop("off", None)
    names = [settings.pop("short", None), f"{name}/{off}" if off else name, settings.pop("name", None)]
    if not (settings.get("is_flag") or off or settings.get("required") or settings.get("default") is not None):
        settings.setdefault("show_default", "none")
    if kind is not None:
        settings.update(type=_TYPES[kind], metavar=settings.get("metavar", _METAVARS.get(kind)))
    if off:
        settings.setdefault("default", None)
    return Option(list(filter(None, names)), panel=panel, **settings)


def option(name: str, **more: Any) -> Decorator:
    """Return a decorator that adds an option of the vocabulary, with the arguments of `make_option`."""
    return click.option(name, cls=lambda names, **settings: make_option(*names, **settings), **more)  # type: ignore[arg-type]


def all_of(*options: Decorator | str) -> Decorator:
    """Return a decorator that adds several options, or names of options, in the order of help."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(options):
            function = (option(decorator) if isinstance(decorator, str) else decorator)(function)
        return function

    return decorate


ONE_MODEL: tuple[Decorator, ...] = (click.argument("model", required=False),)


def _choose_backend(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Set Keras's backend before Keras is imported."""
    if value is not None:
        os.environ["KERAS_BACKEND"] = value


_STEP: tuple[Decorator | str, ...] = (
    "--mode", "--jit-compile", "--optimizer", "--loss", "--dtype-policy", "--target-shape", "--target-dtype",
    "--sample-weight", "--data",
    "--input-shape", "--factory", "--factory-arg", "--custom-objects", "--trust",
    option("--backend", callback=_choose_backend, expose_value=False, is_eager=True),
)  # fmt: skip
PROFILE = ("--kernels", "--threads")
_REPORT = ("--verbose", option("--top", show_default="8; with -v all"), "--json", "--csv")
TRUST = "--trust-file"
# The input file with its datasets and batch size.
FILE: tuple[Decorator | str, ...] = (
    click.argument("file", type=click.Path()),
    "--x",
    "--y",
    option("--batch-size", default=32),
)
# The output file.
WRITING: tuple[Decorator | str, ...] = (
    option("--output", required=True), "--columns", "--drop", "--shuffle", "--seed", "--split", "--compression",
    "--force", "--workers", "--dask", "--part-size", TRUST,
    option("--memory-budget", default="512MiB"), "--json",
)  # fmt: skip


def model_options(
    *own: Decorator | str,
    arguments: tuple[Decorator, ...] = ONE_MODEL,
    output: tuple[Decorator | str, ...] = _REPORT,
    shared: tuple[Decorator | str, ...] = ("--batch-size", "--device"),
) -> Decorator:
    """Return a decorator that adds a command's own options and the options of a model and its training step.

    Args:
        *own: the command's own options.
        arguments: positional arguments. Defaults to an optional MODEL.
        output: options of the output.
        shared: options before the command's own.
    """
    return all_of(*arguments, *shared, *own, *_STEP, *output)


def check_options(command: str, model: str | None, options: dict[str, Any], needs_device: bool = False) -> None:
    """Check options before TensorFlow is imported.

    Args:
        command: name of the command.
        model: the argument MODEL.
        options: the other options.
        needs_device: whether the command requires --device.

    Raises:
        ModelFileError: If the file does not exist.
        UsageError: If a model, device, Python file or card is missing, or two output formats are named.
    """
    from kerasmem.devices.catalogue import resolve_device
    from kerasmem.models.document import check_factory_name, check_model_name

    if model is not None and needs_device and options["device"] is None:
        raise UsageError("--device must be a card or a size, such as --device t4 or --device 16GB; got none")
    if model is None and options["factory"] is None:
        raise UsageError(
            f"MODEL must be a file or package.module:function; got none. `kerasmem {command} -h` has examples"
        )
    if options["as_json"] and options.get("as_csv"):
        raise UsageError("--json and --csv cannot be combined; choose one")
    if options.get("batch_size") is not None:
        batch_size("--batch-size", options["batch_size"], options.get("method"))
    if options.get("device") is not None:
        resolve_device(options["device"])
    if model is not None:
        check_model_name(model)
    for option in ("factory", "data"):
        if options.get(option) is not None:
            check_factory_name(options[option], f"--{option}")


def step_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `StepSpec` from the options. It imports Keras."""
    from kerasmem.models.spec import EstimateSettings

    settings = {name: options[name] for name in EstimateSettings.__annotations__ if name in options}
    return {
        **settings,
        **{name: list(options[name]) or None for name in ("input_shape", "target_shape", "custom_objects")},
        "factory_args": parse_factory_args(options["factory_args"]),
        "jit_compile": "auto" if options["jit_compile"] is None else options["jit_compile"],
    }


def parse_factory_args(texts: Iterable[str]) -> dict[str, Any]:
    """Read arguments such as "depth=5". A value is JSON if possible (5, 0.1, true, [1, 2]), else text.

    Raises:
        UsageError: If an argument has no name.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--factory-arg must be NAME=VALUE, such as depth=5; got {text!r}")
        arguments[name] = value
        with contextlib.suppress(ValueError):
            arguments[name] = read_json(value)
    return arguments


def worst(verdicts: Iterable[str]) -> int:
    """Return the exit code of the worst verdict: does not fit, too close to call, fits."""
    return max((EXIT_CODES[verdict] for verdict in verdicts), key=_SEVERITY.index, default=0)


def read_lists(option: str, texts: Sequence[str], example: str) -> dict[str, str]:
    """Split texts such as "batch_size=16,32" into names and values.

    Raises:
        UsageError: If a text is not NAME=VALUE,VALUE, or a name is repeated.
    """
    lists: dict[str, str] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name or not all(values.split(",")):
            raise UsageError(f"{option} must be NAME=VALUE,VALUE, such as {example}; got {text!r}")
        if name in lists:
            raise UsageError(f"{option} {name} must be used once, with all values; got it twice")
        lists[name] = values
    return lists
