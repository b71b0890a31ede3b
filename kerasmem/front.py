"""The public functions that join rooms: an estimate, and the way it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from kerasmem.estimation.facade import DEFAULT_BATCH_SIZE, estimate
from kerasmem.rendering.summary_table import DEFAULT_WIDTH, print_summary


def summary(
    model: Any,
    batch_size: int = DEFAULT_BATCH_SIZE,
    *,
    line_length: int | None = None,
    positions: Sequence[float] | None = None,
    print_fn: Callable[[str], object] | None = None,
    expand_nested: bool = False,
    show_trainable: bool = False,
    layer_range: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Print the table of `model.summary()` with what each layer takes in memory.

    Args:
        model: a Keras model, or anything else that `kerasmem.estimate` takes.
        batch_size: samples in a batch.
        line_length: columns of a line.
        positions: where each column ends, as a share of the line or in columns.
        print_fn: called once with the whole text in place of printing it.
        expand_nested: show the layers of nested models.
        show_trainable: show whether a layer is trained.
        layer_range: two names or patterns; only the layers from the one to the other are shown.
        **options: of `kerasmem.estimate`, such as `input_shape` or `dtype_policy`; the method is "formula", which
            answers at once, unless another is named.

    Raises:
        KerasmemError: as `kerasmem.estimate`.

    Example:
        >>> import keras, kerasmem
        >>> kerasmem.summary(keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]), batch_size=16)
        ... # doctest: +SKIP
    """
    report = estimate(model, batch_size=batch_size, **{"method": "formula", **options})  # at once, as Keras's own is
    look = {"emoji": False, "markup": False, "highlight": False}
    if print_fn is None:
        console = Console(**look)  # type: ignore[arg-type]
    else:
        console = Console(**look, color_system=None, width=line_length or DEFAULT_WIDTH)  # type: ignore[arg-type]
        console.begin_capture()
    print_summary(
        report,
        console,
        line_length=line_length,
        positions=positions,
        expand_nested=expand_nested,
        show_trainable=show_trainable,
        layer_range=layer_range,
    )
    if print_fn is not None:
        print_fn(console.end_capture())
