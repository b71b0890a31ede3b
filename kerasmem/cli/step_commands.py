"""`kerasmem measure` and `kerasmem profile`: real training steps in a subprocess."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.estimate_command import show_report
from kerasmem.cli.options import EXIT_CODES, PROFILE, check_options, model_options, option, step_settings
from kerasmem.cli.terminal import quiet_tensorflow, show_json, show_text, spinner


@click.command("measure", cls=GuardedCommand, seconds=7200)
@model_options(option("--steps", default=10), "--timeout", *PROFILE)
def measure_command(model: str | None, steps: int, timeout: float, **options: Any) -> int:
    """Measure the memory of real training steps of MODEL in a subprocess.

    The weights are random, and the batch is zeros. Without a GPU, TensorFlow uses its allocator for GPUs on the CPU.
    MODEL is as in `kerasmem estimate`.

    Examples:
      kerasmem measure model.keras --batch-size 64
      kerasmem measure keras.applications:MobileNetV2 --batch-size 32 --optimizer adam --device t4
      kerasmem measure mymodels.unet:build --batch-size 8 --jit-compile --json

    Exit codes: 0 done (and fits) · 1 the model failed, or ran out of memory or time ·
    2 wrong usage or unreadable input · 3 does not fit · 4 too close to call
    """
    check_options("measure", model, options)
    with quiet_tensorflow(), spinner(f"measuring {model or options['factory']}"):
        from kerasmem.estimation.measuring import measure

        report = measure(model, steps=steps, timeout=timeout, **step_settings(options))
    return show_report(report, options)


@click.command("profile", cls=GuardedCommand, seconds=7200)
@model_options(
    option("--steps", default=5), "--timeout", *PROFILE, output=(option("--top", show_default="25"), "--json")
)
def profile_command(model: str | None, steps: int, timeout: float, **options: Any) -> int:
    """Profile the memory at the peak of a real training step of MODEL, by layer and category.

    The steps run in a subprocess with TensorFlow's profiler. The weights are random, and the batch is zeros. Without a
    GPU, TensorFlow uses its allocator for GPUs on the CPU. MODEL is as in `kerasmem estimate`.

    Examples:
      kerasmem profile model.keras --batch-size 64
      kerasmem profile keras.applications:MobileNetV2 --batch-size 8 --optimizer adam
      kerasmem profile mymodels.unet:build --jit-compile
      kerasmem profile model.h5 --json > profile.json

    Exit codes: 0 done (and fits) · 1 the model failed, or ran out of memory or time ·
    2 wrong usage or unreadable input · 3 does not fit · 4 too close to call
    """
    check_options("profile", model, options)
    with quiet_tensorflow(), spinner(f"profiling {model or options['factory']}"):
        from kerasmem.estimation.measuring import profile

        result = profile(model, steps=steps, timeout=timeout, **step_settings(options))
    device = None
    if options["device"] is not None:
        from kerasmem.devices.catalogue import resolve_device
        from kerasmem.estimation.methods import constant_bytes
        from kerasmem.estimation.report import device_verdict

        need = result.bytes
        if result.settings.stands_in:
            need = replace(need, low=constant_bytes(need))
        device = device_verdict(resolve_device(options["device"]), need)
    if options["as_json"]:
        show_json({**result.to_dict(), "device": device and asdict(device)})
    else:
        from kerasmem.rendering.estimate_tables import profile_table

        show_text(lambda terminal: profile_table(result, terminal, device=device, top=options["top"]))
    return 0 if device is None else EXIT_CODES[device.verdict]
