"""What commands share: groups of options, what they come to as arguments, saved reports, exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from kerasmem.checks import batch_size
from kerasmem.cli.vocabulary import Decorator, all_of, option
from kerasmem.errors import UsageError

EXIT_CODES = {
    "fits": 0, "within the limit": 0, "does not fit": 3, "exceeds the limit": 3, "too close to call": 4,
}  # fmt: skip
_SEVERITY = (0, 4, 3)
_LARGEST = 64 * 2**20
_LOGS = (b'{"kind"', b'{"kind ')  # how a log begins, each of whose lines is an object

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
_REPORT = ("--verbose", "--sort", option("--top", show_default="8; with -v all"), "--json", "--csv")
TRUST = "--trust-file"
# The datasets of a file that are features and targets, and how much is read at once.
FILE: tuple[Decorator | str, ...] = (click.argument("file", type=click.Path()), "--x", "--y", "--batch-size")
# How a file is written.
WRITING: tuple[Decorator | str, ...] = (
    option("--output", required=True), "--columns", "--drop", "--batch-size", "--shuffle", "--seed", "--compression",
    "--verify", "--force", "--engine", "--part-size", TRUST,
    option("--memory-budget", default="512MiB", former="--memory"), "--json",
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
    """Refuse what can be refused before TensorFlow is loaded.

    Args:
        command: its name.
        model: as it was named.
        options: the shared ones.
        needs_device: the command looks for what fits one.

    Raises:
        ModelFileError: there is no such file.
        UsageError: no model is named, two outputs are asked for, or there is no such function, card or optimizer.
    """
    from kerasmem.devices.catalogue import resolve_device
    from kerasmem.models.names import check_factory_name, check_model_name, check_optimizer_name

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
    if options["optimizer"] is not None:
        check_optimizer_name(options["optimizer"])
    if model is not None:
        check_model_name(model)
    if options["factory"] is not None:
        check_factory_name(options["factory"], "--factory")


def call_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the shared options as `kerasmem.estimate` takes them; loads Keras."""
    from kerasmem.models.vocabulary import load_custom_objects, parse_factory_args

    same = ("batch_size", "optimizer", "loss", "target_dtype", "dtype_policy", "device", "mode", "factory", "trust")
    return {
        **{name: options[name] for name in same if name in options},
        **{name: list(options[name]) or None for name in ("input_shape", "target_shape")},
        "factory_args": parse_factory_args(options["factory_args"]),
        "custom_objects": load_custom_objects(options["custom_objects"]) if options["custom_objects"] else None,
        "jit_compile": "auto" if options["jit_compile"] is None else options["jit_compile"],
    }


def worst(verdicts: Iterable[str]) -> int:
    """Return the exit code of the worst of some verdicts: does not fit, too close to call, fits."""
    return max((EXIT_CODES[each] for each in verdicts), key=_SEVERITY.index, default=0)


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


def json_object(path: str) -> dict[str, Any] | None:
    """Return the object in a file that holds one JSON object; None for anything else, and for what cannot be read.

    Raises:
        RecursionError: it is nested too deeply.
    """
    file = Path(path)
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return None
        with file.open("rb") as opened:
            start = opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        if not start.startswith(b"{") or start.startswith(_LOGS):
            return None
        data = json.loads(file.read_text("utf-8-sig", errors="replace"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
