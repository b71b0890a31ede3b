"""Options of the commands, each described once in `data/vocabulary.json`: panel → name → meaning.

`short` and `off` are its other spellings, `name` its name in Python if that differs, and `type` one of `_TYPES`. All
else is as for `click.Option`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import click

from kerasmem.checks import Color, Decimal, MethodName, Mode, RowsAxis, batch_size, nearest
from kerasmem.errors import UsageError
from kerasmem.files import package_data

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
FIRST = "Options"  # the panel of a command's own options
EXIT_CODES = {
    "fits": 0, "within the limit": 0, "does not fit": 3, "exceeds the limit": 3, "too close to call": 4,
}  # fmt: skip
_SEVERITY = (0, 4, 3)


class Choice(click.Choice[str]):
    """One of some words; the message about another one names the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Add the nearest word to the message."""
        return super().get_invalid_choice_message(value, ctx).rstrip(".") + (nearest(value, self.choices) or ".")


_TYPES: dict[str, Any] = {
    "count": click.IntRange(min=1),
    "whole": click.IntRange(min=0),
    "number": click.FLOAT,
    "seconds": click.FloatRange(min=0, min_open=True),
    "seconds or 0": click.FloatRange(min=0),
    "share": click.FloatRange(0, 1, max_open=True),
    "file": click.Path(),
    "output": click.Path(dir_okay=False),
    "folder": click.Path(file_okay=False),
    "method": Choice(get_args(MethodName)),
    "mode": Choice(get_args(Mode)),
    "backend": Choice(["tensorflow", "jax"]),
    "color": Choice(get_args(Color)),
    "decimal": Choice(get_args(Decimal)),
    "rows axis": Choice(get_args(RowsAxis)),
}
_METAVARS = {"count": "N", "whole": "N", "seconds": "SECONDS", "output": "FILE", "folder": "FOLDER"}
_VOCABULARY: dict[str, tuple[str, dict[str, Any]]] = {
    name: (panel, meaning)
    for panel, options in package_data(__package__, "vocabulary").items()
    for name, meaning in options.items()
}


class Option(click.Option):
    """An option in a panel of the help.

    Args:
        *names: as for `click.Option`.
        panel: the heading under which help lists it.
        **options: as for `click.Option`.
    """

    def __init__(self, *names: Any, panel: str = FIRST, **options: Any) -> None:
        super().__init__(*names, **options)
        self.panel = panel


def make_option(name: str, **more: Any) -> Option:
    """Make an option of the vocabulary.

    Args:
        name: its long name.
        **more: settings of one command, such as its default.
    """
    panel, meaning = _VOCABULARY[name]
    words = {**meaning, **more}
    kind, off = words.pop("type", None), words.pop("off", None)
    spelled = [words.pop("short", None), f"{name}/{off}" if off else name, words.pop("name", None)]
    if not (words.get("is_flag") or off or words.get("required") or words.get("default") is not None):
        words.setdefault("show_default", "none")
    if kind is not None:
        words.update(type=_TYPES[kind], metavar=words.get("metavar", _METAVARS.get(kind)))
    if off:
        words.setdefault("default", None)
    return Option([each for each in spelled if each], panel=panel, **words)


def option(name: str, **more: Any) -> Decorator:
    """Return a decorator that adds an option of the vocabulary; the arguments are as for `make_option`."""
    return click.option(name, cls=lambda names, **words: make_option(*names, **words), **more)  # type: ignore[arg-type]


def all_of(*options: Decorator | str) -> Decorator:
    """Return a decorator that adds several options in the order of help; a name stands for its option."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(options):
            function = (option(each) if isinstance(each, str) else each)(function)
        return function

    return decorate


ONE_MODEL: tuple[Decorator, ...] = (click.argument("model", required=False),)


def _choose_backend(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Choose Keras's backend before anything loads Keras."""
    if value is not None:
        os.environ["KERAS_BACKEND"] = value


_STEP: tuple[Decorator | str, ...] = (
    "--mode", "--jit-compile", "--optimizer", "--loss", "--dtype-policy", "--target-shape", "--target-dtype",
    "--input-shape", "--factory", "--factory-arg", "--custom-objects", "--trust",
    option("--backend", callback=_choose_backend, expose_value=False, is_eager=True),
)  # fmt: skip
_REPORT = ("--verbose", option("--top", show_default="8; with -v all"), "--json", "--csv")
TRUST = "--trust-file"
# The datasets of a file that are features and targets, and how much is read at once.
FILE: tuple[Decorator | str, ...] = (click.argument("file", type=click.Path()), "--x", "--y", "--batch-size")
# How a file is written.
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
    """Return a decorator that adds the shared options, with the command's own between the model's and training's.

    Args:
        *own: options of the command.
        arguments: what it takes without a name.
        output: the options for what it prints.
        shared: the first options.
    """
    return all_of(*arguments, *shared, *own, *_STEP, *output)


def check_options(command: str, model: str | None, options: dict[str, Any], needs_device: bool = False) -> None:
    """Check options before TensorFlow is loaded.

    Args:
        command: its name.
        model: as it was named.
        options: the shared ones.
        needs_device: the command looks for what fits one.

    Raises:
        ModelFileError: there is no such file.
        UsageError: no model is named, two outputs are asked for, or there is no such Python file or card.
    """
    from kerasmem.devices.catalogue import resolve_device
    from kerasmem.models.document import check_factory_name, check_model_name

    if model is not None and needs_device and options["device"] is None:
        raise UsageError("name the device that it must fit: --device t4, or a size such as --device 16GB")
    if model is None and options["factory"] is None:
        raise UsageError(f"name a model file, or package.module:function; `kerasmem {command} -h` shows examples")
    if options["as_json"] and options.get("as_csv"):
        raise UsageError("--json and --csv: choose one")
    if "batch_size" in options:
        batch_size("--batch-size", options["batch_size"], options.get("method"))
    if options["device"] is not None:
        resolve_device(options["device"])
    if model is not None:
        check_model_name(model)
    if options["factory"] is not None:
        check_factory_name(options["factory"], "--factory")


def step_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are settings of `StepSpec`; loads Keras."""
    from kerasmem.models.spec import EstimateSettings
    from kerasmem.models.vocabulary import parse_factory_args

    settings = {name: options[name] for name in EstimateSettings.__annotations__ if name in options}
    return {
        **settings,
        **{name: list(options[name]) or None for name in ("input_shape", "target_shape", "custom_objects")},
        "factory_args": parse_factory_args(options["factory_args"]),
        "jit_compile": "auto" if options["jit_compile"] is None else options["jit_compile"],
    }


def worst(verdicts: Iterable[str]) -> int:
    """Return the exit code of the worst of some verdicts: does not fit, too close to call, fits."""
    return max((EXIT_CODES[each] for each in verdicts), key=_SEVERITY.index, default=0)


def read_lists(option: str, texts: Sequence[str], example: str) -> dict[str, str]:
    """Split texts such as "batch_size=16,32" at their equals signs.

    Raises:
        UsageError: If a text is not NAME=VALUE,VALUE, or a name comes twice.
    """
    lists: dict[str, str] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name or not all(values.split(",")):
            raise UsageError(f"{option}: {text!r} is not NAME=VALUE,VALUE; write for example {example}")
        if name in lists:
            raise UsageError(f"{option}: {name!r} is given twice; list its values in one option")
        lists[name] = values
    return lists
