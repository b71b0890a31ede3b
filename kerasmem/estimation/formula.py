"""The hand formula: parameters × 2 × 4 + batch × activation elements × 2 × 4.

Source: "Is my neural network too big to fit into GPU?" (SHARCNET, 2020). Each parameter has a gradient, each
activation has one too (× 2), and everything is float32 (× 4). Dropout and the layers that only give a buffer
another shape (Flatten, Reshape) add nothing. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kerasmem.estimation.report import Bytes, Formula, LayerMemory, MemoryReport
from kerasmem.files import package_data

FLOAT32_BYTES = 4

# How far a real training step was from this formula: the least and the most of (measured − optimizer slots) /
# formula over 30 measured configurations without opaque layers, graph mode, CPU.
MEASURED_LOW, MEASURED_HIGH = 0.30, 1.60

# Layers that compute much more inside than they put out (a gate a time step, scores of attention): the formula
# sees their outputs only, and real steps took nearly six times its figure, so it claims no upper bound for them.
OPAQUE = frozenset(package_data("kerasmem.estimation", "layers")["much more inside than they put out"])


def copies(mode: str) -> int:
    """Return 2 for training (a value and its gradient) and 1 for inference."""
    return 2 if mode == "train" else 1


def formula(layers: Iterable[LayerMemory], batch_size: int, mode: str = "train") -> Formula:
    """Return the formula's figures for a model.

    Args:
        layers: a row for each layer and input.
        batch_size: samples.
        mode: "train" or "inference" (no gradients: × 1 in place of × 2).

    Examples:
        >>> from kerasmem.estimation.report import LayerMemory
        >>> dense = LayerMemory(
        ...     name="dense", class_name="Dense", output_shape=(None, 10), parameters=10_250,
        ...     trainable_parameters=10_250, activation_elements=10, activation_bytes=40, weight_bytes=41_000,
        ...     dtype="float32", uses=1, kind="layer",
        ... )
        >>> formula([dense], batch_size=32).total_bytes
        84560
    """
    rows = list(layers)
    factor = copies(mode) * FLOAT32_BYTES
    elements = sum(row.activation_elements or 0 for row in rows)
    parameters = sum(row.parameters for row in rows)
    return Formula(
        parameter_bytes=parameters * factor,
        activation_elements_per_sample=elements,
        activation_bytes_per_sample=elements * factor,
        total_bytes=parameters * factor + batch_size * elements * factor,
        copies=copies(mode),
        activation_bytes=batch_size * sum(row.activation_bytes or 0 for row in rows if row.kind != "input"),
    )


def share_out(layers: Iterable[LayerMemory], batch_size: int, mode: str = "train") -> tuple[LayerMemory, ...]:
    """Return the rows with `bytes`: their share of the total, at the true sizes of their dtypes."""
    return tuple(
        replace(row, bytes=copies(mode) * (row.weight_bytes + batch_size * (row.activation_bytes or 0)))
        for row in layers
    )


def opaque_layers(layers: Iterable[LayerMemory]) -> list[str]:
    """Return the names of the layers with intermediate values that the formula does not count."""
    return [row.name for row in layers if row.class_name in OPAQUE]


def formula_bytes(
    layers: Iterable[LayerMemory], batch_size: int, mode: str = "train", optimizer_bytes: int | None = None
) -> Bytes:
    """Return the formula by category, at the true sizes of the dtypes, with the interval that was measured.

    For an all-float32 model `total` is `formula(...).total_bytes`. The interval is the formula times the least and
    the most that real steps took of it, plus the optimizer's slots, which the formula leaves out; without an upper
    end where the model has layers whose insides (`OPAQUE`) or outputs the formula does not see. Only training was
    measured: for inference nothing is claimed but that the weights are there.

    Args:
        layers: a row for each layer and input.
        batch_size: samples.
        mode: "train" or "inference".
        optimizer_bytes: the optimizer's slots, where known; they widen the interval, not the total.
    """
    rows = share_out(layers, batch_size, mode)
    weights = sum(row.weight_bytes for row in rows)
    total = sum(row.bytes or 0 for row in rows)
    inputs = sum(row.bytes or 0 for row in rows if row.kind == "input")
    unseen = opaque_layers(rows) or any(row.activation_elements is None for row in rows)
    return Bytes(
        total=total,
        low=max(int(total * MEASURED_LOW), weights) if mode == "train" else weights,
        high=None if unseen or mode != "train" else int(total * MEASURED_HIGH) + (optimizer_bytes or 0),
        weights=weights,
        gradients=(copies(mode) - 1) * weights,
        activations=total - copies(mode) * weights - inputs,
        inputs=inputs,
    )


def known_networks() -> tuple[tuple[str, int, int], ...]:
    """Return networks that people know: name, parameters, activation elements for one sample.

    Images of 224 × 224 × 3, 1000 classes; AlexNet as one tower, GoogLeNet without its auxiliary outputs.
    `scripts/known_networks.py` writes the file.

    Examples:
        >>> known_networks()[0][0]
        'AlexNet'
    """
    return tuple(map(tuple, package_data("kerasmem.estimation", "known_networks")))


def networks_beside(report: MemoryReport) -> tuple[tuple[int, str] | None, tuple[int, str] | None]:
    """Return the largest known network that takes no more than a model, and the smallest that takes more.

    Each by its bytes and its name, at the batch and the mode of the model; None if there is none.
    """
    size, total = report.formula.copies * FLOAT32_BYTES, report.formula.total_bytes
    batch = report.settings.batch_size
    known = [(size * (parameters + batch * elements), name) for name, parameters, elements in known_networks()]
    below = max((network for network in known if network[0] <= total), default=None)
    return below, min((network for network in known if network[0] > total), default=None)
