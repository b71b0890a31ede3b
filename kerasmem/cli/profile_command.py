"""`kerasmem profile`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.options import EXIT_CODES, check_options, model_options, option, step_settings
from kerasmem.cli.terminal import quiet_tensorflow, show_json, show_text, spinner
from kerasmem.errors import UsageError
from kerasmem.files import write_named

if TYPE_CHECKING:
    from kerasmem.estimation.report import DeviceVerdict
    from kerasmem.profiling.results import StepProfile


_LARGEST = 25  # layers that are listed, where no other number is asked for


@click.command("profile", cls=GuardedCommand, seconds=7200)
@model_options(
    option("--steps", default=5), "--timeout",
    output=(
        "--output", option("--sort", default="size", show_default=None), option("--top", show_default=str(_LARGEST)),
        "--json",
    ),
)  # fmt: skip
def command(model: str | None, steps: int, timeout: float, output: str | None, **options: Any) -> int:
    """Train MODEL for some steps and say what is in memory at the peak of one, by layer and category.

    The steps run in a process of their own, with real (random) weights and a batch of zeros, under TensorFlow's
    profiler; on a machine without a GPU the allocator is the one that TensorFlow uses on GPUs.
    MODEL is as for `kerasmem estimate`.

    Examples:
      kerasmem profile model.keras --batch-size 64
      kerasmem profile keras.applications:MobileNetV2 --batch-size 8 --optimizer adam
      kerasmem profile mymodels.unet:build --jit-compile --top 10 -o profile.json
      kerasmem profile model.h5 --json

    Exit codes: 0 done (and fits) · 1 the model failed, or ran out of memory or time ·
    2 wrong usage or unreadable input · 3 does not fit · 4 too close to call
    """
    _check_output(output)
    check_options("profile", model, options)
    name = model or options["factory"]
    with quiet_tensorflow(), spinner(f"profiling {name}", "profile"):
        from kerasmem.estimation.measuring import profile

        found = profile(model, steps=steps, timeout=timeout, **step_settings(options))
    device = None
    if options["device"] is not None:
        from kerasmem.devices.catalogue import resolve_device
        from kerasmem.estimation.report import device_verdict

        device = device_verdict(resolve_device(options["device"]), found.bytes)
    data = {**found.to_dict(), "device": device and asdict(device)}
    if output is not None:
        from kerasmem.rendering.data import to_json

        write_named(output, (to_json(data) + "\n").encode())
    if options["as_json"]:
        show_json(data)
    else:
        _show_text(found, device, options)
    return 0 if device is None else EXIT_CODES[device.verdict]


def _check_output(output: str | None) -> None:
    """Refuse a file that cannot be written before minutes are spent."""
    if output is None:
        return
    folder = os.path.dirname(os.path.abspath(output))
    if not os.path.isdir(folder):
        raise UsageError(f"-o {output}: there is no folder {folder}")
    if not os.access(output if os.path.exists(output) else folder, os.W_OK):
        raise UsageError(f"-o {output}: may not be written")


def _show_text(found: StepProfile, device: DeviceVerdict | None, options: dict[str, Any]) -> None:
    from kerasmem.rendering.peak_text import verdict_line
    from kerasmem.rendering.profile_table import profile_table

    look = {"sort": options["sort"], "top": _LARGEST if options["top"] is None else options["top"]}
    show_text(lambda terminal: profile_table(found, terminal, **look))
    if device is not None:
        click.echo(verdict_line(device, found.bytes).plain)
