"""What an estimate found: frozen results in bytes and counts, to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from kerasmem.errors import InputError, check_format
from kerasmem.models.op_names import Instant

FORMAT_VERSION = 1


@dataclass(frozen=True)
class ModelFacts:
    """The model: name, where it came from, layers and parameters (counts)."""

    name: str
    source: str
    layers: int
    parameters: int
    trainable_parameters: int


@dataclass(frozen=True)
class Settings:
    """What was asked. `execution` is "graph", "xla" or "none" where a method looks at neither.

    Of several devices (`replicas`) the report is of one, and `batch_size` its share; `parallel` is "data" or "model",
    None for one device.
    """

    batch_size: int
    optimizer: str | None
    loss: str | None
    dtype_policy: str
    mode: str
    method: str
    execution: str
    device: str | None
    replicas: int = 1
    parallel: str | None = None
    shard_optimizer: bool = False


@dataclass(frozen=True)
class Bytes:
    """The peak in bytes and what it is made of; None where the method does not know."""

    total: int
    low: int | None
    high: int | None
    weights: int | None
    optimizer: int | None
    gradients: int | None
    activations: int | None
    inputs: int | None
    workspace: int | None
    allocator: int | None

    CATEGORIES: ClassVar[tuple[str, ...]] = (
        "weights", "optimizer", "gradients", "activations", "inputs", "workspace", "allocator",
    )  # fmt: skip


@dataclass(frozen=True)
class Formula:
    """The hand formula, every value taken as float32.

    Attributes:
        parameter_bytes: parameters × 2 × 4 (× 1 × 4 for inference).
        activation_elements_per_sample: output elements of all layers for one sample.
        activation_bytes_per_sample: those × 2 × 4 (× 1 × 4 for inference).
        total_bytes: parameter_bytes + batch × activation_bytes_per_sample.
        copies: 2 where a value has a gradient beside it (training), 1 for inference.
    """

    parameter_bytes: int
    activation_elements_per_sample: int
    activation_bytes_per_sample: int
    total_bytes: int
    copies: int = 2


@dataclass(frozen=True)
class LayerMemory:
    """One layer.

    Attributes:
        name: the path of names through nested models, joined by "/".
        class_name: the layer's class ("class" in JSON).
        output_shape: of its first output, None for the batch; None where it is not known.
        parameters: numbers in its weights, each weight counted in the first layer that has it.
        trainable_parameters: those of them that are trained.
        activation_elements: output elements for one sample, over all uses; 0 for a view, None if unknown.
        activation_bytes: the same in bytes at the true dtype, for one sample.
        weight_bytes: its weights in bytes at their true dtype.
        dtype: of its first output.
        uses: how often the model calls it.
        kind: "input", "layer" or "view".
        inputs: the names of the layers whose outputs it takes, as far as known.
        bytes: its part of the report's total, where the method divides the total by layer.
        bytes_at_peak: what it holds at the peak, where the method knows.
    """

    name: str
    class_name: str
    output_shape: tuple[int | None, ...] | None
    parameters: int
    trainable_parameters: int
    activation_elements: int | None
    activation_bytes: int | None
    weight_bytes: int
    dtype: str | None
    uses: int
    kind: str
    inputs: tuple[str, ...] = ()
    bytes: int | None = None
    bytes_at_peak: int | None = None


@dataclass(frozen=True)
class NestedModel:
    """A model, or a layer made of layers, inside the model; its layers have rows of their own.

    Attributes:
        name: its path; the names of its layers begin with it and "/".
        class_name: its class ("class" in JSON).
        output_shape: of its first output, None for the batch.
        uses: how often it is called.
    """

    name: str
    class_name: str
    output_shape: tuple[int | None, ...] | None
    uses: int


@dataclass(frozen=True)
class DeviceVerdict:
    """Whether it fits: the device, its bytes, those the allocator can have, and the verdict in words.

    `note` says where the figures come from.
    """

    name: str
    memory_bytes: int
    available_bytes: int
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Pool:
    """What the allocator holds at the peak, in bytes, three figures kept apart; None where not known.

    Attributes:
        requested: the bytes that the step's tensors ask for.
        in_use: the chunks handed out for them (the report's total).
        reserved: the regions that the allocator took from the device, under memory growth.
        driver: what the driver will show for the process: reserved, and the context and libraries on a GPU.
        smallest_limit: the smallest memory limit under which the step still trains.
    """

    requested: int | None
    in_use: int
    reserved: int | None
    driver: int | None = None
    smallest_limit: int | None = None


@dataclass(frozen=True)
class Alternative:
    """What another method says of the same step, or why it says nothing (`total` is None then)."""

    method: str
    execution: str
    total: int | None
    low: int | None
    high: int | None
    why: str = ""


@dataclass(frozen=True)
class Unmodelled:
    """Something that costs memory and is not in the total."""

    what: str
    why: str
    bytes: int | None = None


@dataclass(frozen=True)
class MemoryReport:
    """How much memory a training step needs, by one method.

    `to_dict` gives the object that `kerasmem estimate --json` prints; `from_dict` reads it back.
    """

    model: ModelFacts
    settings: Settings
    bytes: Bytes
    formula: Formula
    layers: tuple[LayerMemory, ...]
    nested: tuple[NestedModel, ...] = ()
    device: DeviceVerdict | None = None
    unmodelled: tuple[Unmodelled, ...] = ()
    notes: tuple[str, ...] = field(default=())
    pool: Pool | None = None
    instant: Instant | None = None
    alternatives: tuple[Alternative, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data, sizes in integer bytes."""
        data: dict[str, Any] = _plain(asdict(self))
        data["layers"] = [{key: layer[key] for key in _LAYER_ORDER} for layer in data["layers"]]
        return {"format_version": FORMAT_VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryReport:
        """Read what `to_dict` gave; fields that this version does not know are passed over.

        Raises:
            InputError: it is no such report, or of a later format.
        """
        check_format("report", data, FORMAT_VERSION)
        try:
            return cls(
                model=_build(ModelFacts, data["model"]),
                settings=_build(Settings, data["settings"]),
                bytes=_build(Bytes, data["bytes"]),
                formula=_build(Formula, data["formula"]),
                layers=tuple(_shaped(LayerMemory, item) for item in data["layers"]),
                nested=tuple(_shaped(NestedModel, item) for item in data.get("nested", [])),
                device=_build(DeviceVerdict, data["device"]) if data.get("device") else None,
                unmodelled=tuple(_build(Unmodelled, item) for item in data.get("unmodelled", [])),
                notes=tuple(data.get("notes", [])),
                pool=_build(Pool, data["pool"]) if data.get("pool") else None,
                instant=_build(Instant, data["instant"]) if data.get("instant") else None,
                alternatives=tuple(_build(Alternative, item) for item in data.get("alternatives", [])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"report: not a kerasmem estimate ({type(error).__name__}: {error})") from error


_LAYER_ORDER = (
    "name", "class", "output_shape", "parameters", "activation_elements", "bytes_at_peak",
    "bytes", "trainable_parameters", "activation_bytes", "weight_bytes", "dtype", "uses", "kind",
    "inputs",
)  # fmt: skip


def _plain(value: Any) -> Any:
    """Return the value as JSON has it: lists for tuples, and `class` for what Python cannot call so."""
    if isinstance(value, dict):
        return {"class" if key == "class_name" else key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _shaped(cls: Any, data: Mapping[str, Any]) -> Any:
    shape, inputs = data["output_shape"], tuple(data.get("inputs", ()))
    shape = None if shape is None else tuple(shape)
    return _build(cls, {**data, "class_name": data["class"], "output_shape": shape, "inputs": inputs})


def _build(cls: Any, data: Mapping[str, Any]) -> Any:
    known = {each.name for each in fields(cls)}
    return cls(**{key: value for key, value in data.items() if key in known})
