"""The hand formula: parameters × 2 × 4 + batch × activation elements × 2 × 4.

Source: "Is my neural network too big to fit into GPU?" (SHARCNET, 2020). Each parameter has a gradient, each
activation has one too (× 2), and everything is float32 (× 4). Dropout and the layers that only give a buffer
another shape (Flatten, Reshape) add nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kerasmem.estimation.report import Bytes, Formula, LayerMemory, MemoryReport
from kerasmem.files import package_data

FLOAT32_BYTES = 4

# Smallest and largest (measured − optimizer slots) / formula of 30 measured configurations without opaque layers, in
# graph mode on a CPU.
MEASURED_LOW, MEASURED_HIGH = 0.30, 1.60

# Largest measured number of values that a loss or metric of Keras without large inner values (focal cross-entropy)
# holds at once for each value of the model's outputs, including the output and the target.
MEASURED_LOSS = 12

# Largest measured number of values for each trained weight that the update of an optimizer of Keras (Adadelta, Ftrl)
# holds beyond `MEASURED_HIGH` and the slots.
MEASURED_UPDATE = 3


def copies(mode: str) -> int:
    """Return 2 for training (each value has a gradient), else 1."""
    return 2 if mode == "train" else 1


def formula(layers: Iterable[LayerMemory], batch_size: int, mode: str = "train") -> Formula:
    """Return the formula's figures for a model.

    Args:
        layers: one row for each layer and input.
        batch_size: samples.
        mode: "train", "evaluate" or "inference". Defaults to "train".

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
    """Return the rows with their shares as `bytes`, at the true sizes of dtypes."""
    return tuple(
        replace(row, bytes=copies(mode) * (row.weight_bytes + batch_size * (row.activation_bytes or 0)))
        for row in layers
    )


def formula_bytes(
    layers: Iterable[LayerMemory],
    batch_size: int,
    mode: str = "train",
    optimizer_bytes: int | None = None,
    is_bounded: bool = True,
    inner_bytes: int = 0,
) -> Bytes:
    """Return the formula by category, with an interval from measured steps.

    Bytes are at the true sizes of the dtypes. For an all-float32 model `total` is `formula(...).total_bytes`. The
    interval is the formula times `MEASURED_LOW` and `MEASURED_HIGH`, plus the optimizer's slots and the inner values of
    losses and the update, which the formula leaves out. It has no upper end if inner values or outputs of the step have
    an unknown size: real steps with attention scores took nearly six times the formula. Only training was measured: in
    other modes the lower end is the weights, and the upper end None.

    Args:
        layers: one row for each layer and input.
        batch_size: samples.
        mode: "train", "evaluate" or "inference". Defaults to "train".
        optimizer_bytes: bytes of the optimizer's slots. Defaults to 0.
        is_bounded: whether no part of the step has inner values that no row counts. Defaults to True.
        inner_bytes: largest bytes of the inner values of losses, metrics and the update. Defaults to 0.
    """
    rows = share_out(layers, batch_size, mode)
    weights = sum(row.weight_bytes for row in rows)
    total = sum(row.bytes or 0 for row in rows)
    inputs = sum(row.bytes or 0 for row in rows if row.kind == "input")
    has_high = mode == "train" and is_bounded and all(row.activation_elements is not None for row in rows)
    return Bytes(
        total=total,
        low=max(int(total * MEASURED_LOW), weights) if mode == "train" else weights,
        high=int(total * MEASURED_HIGH) + (optimizer_bytes or 0) + inner_bytes if has_high else None,
        weights=weights,
        gradients=(copies(mode) - 1) * weights,
        activations=total - copies(mode) * weights - inputs,
        inputs=inputs,
    )


def known_networks() -> tuple[tuple[str, int, int], ...]:
    """Return well-known networks: name, parameters, activation elements for one sample.

    Images of 224 × 224 × 3, 1000 classes; AlexNet as one tower, GoogLeNet without its auxiliary outputs.
    `scripts/known_networks.py` writes the file.

    Examples:
        >>> known_networks()[0][0]
        'AlexNet'
    """
    return tuple(map(tuple, package_data("kerasmem.estimation", "known_networks")))


def networks_beside(report: MemoryReport) -> tuple[tuple[int, str] | None, tuple[int, str] | None]:
    """Return the known networks just below and just above a model in memory.

    Each is (bytes at the batch and mode of the model, name), or None beyond the last network.
    """
    size, total = report.formula.copies * FLOAT32_BYTES, report.formula.total_bytes
    batch = report.settings.batch_size
    networks = [(size * (parameters + batch * elements), name) for name, parameters, elements in known_networks()]
    below = max((network for network in networks if network[0] <= total), default=None)
    return below, min((network for network in networks if network[0] > total), default=None)
