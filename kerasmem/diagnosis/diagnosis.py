"""What was found in a log or an exception, as plain results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kerasmem.errors import InputError, check_format

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Suggestion:
    """One thing that is worth doing in this case.

    Attributes:
        what: to do, in a few words.
        why: what it changes here, with the figures of the case.
        code: to paste; Python, or a shell command.
    """

    what: str
    why: str
    code: str


@dataclass(frozen=True)
class Diagnosis:
    """What a text says about a failure; sizes in bytes, None where the text does not say.

    Attributes:
        out_of_memory: whether memory ran out.
        family: whose words they are: "tensorflow", "xla", "pytorch", "jax", "theano", "cuda", "host"; or, where
            memory did not run out, what it was instead: "disk", "notice", "limit", "shape", "nan", "library",
            "stopped", "crash". None: nothing that is known.
        summary: what happened, in one sentence.
        requested_bytes: what was asked for when it failed.
        free_bytes: what was free then, all pieces together.
        largest_free_bytes: the largest piece of it.
        limit_bytes: what there is at most: the card, the allocator's limit, the job's or container's.
        in_use_bytes: what was handed out.
        reserved_bytes: what the allocator had taken from the device, handed out or not.
        device: as the text names it, such as "GPU:0", "TPU" or "host".
        tensor_shape: of the tensor or array that was not to be had.
        dtype: of it.
        operation: that asked for it, as TensorFlow or XLA names it.
        layer: the Keras layer it belongs to.
        pass_: "forward", "backward", "optimizer" or None; "pass" in the JSON.
        cause: "capacity", "fragmentation", "other process" or "unknown"; None where memory did not run out.
        warnings: what must not be overlooked.
        suggestions: two or three, the most useful first.
        lines: first and last line of the place in the text, from 1.
        evidence: the line that shows it, as it stands there; untrusted text.
        later_failures: how many other failures of this kind follow; the first is the one described.
    """

    out_of_memory: bool
    family: str | None = None
    summary: str = ""
    requested_bytes: int | None = None
    free_bytes: int | None = None
    largest_free_bytes: int | None = None
    limit_bytes: int | None = None
    in_use_bytes: int | None = None
    reserved_bytes: int | None = None
    device: str | None = None
    tensor_shape: tuple[int, ...] | None = None
    dtype: str | None = None
    operation: str | None = None
    layer: str | None = None
    pass_: str | None = None
    cause: str | None = None
    warnings: tuple[str, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    lines: tuple[int, int] | None = None
    evidence: str | None = None
    later_failures: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        data = asdict(self)
        data["pass"] = data.pop("pass_")
        for name in ("tensor_shape", "lines"):
            data[name] = None if data[name] is None else list(data[name])
        for name in ("warnings", "suggestions"):
            data[name] = list(data[name])
        return {"format_version": FORMAT_VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Diagnosis:
        """Return the diagnosis that `to_dict` described.

        Raises:
            InputError: the data is of another version, or no diagnosis.
        """
        check_format("diagnosis", data, FORMAT_VERSION)
        values = {("pass_" if name == "pass" else name): value for name, value in data.items()}
        try:
            known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
            for name in ("tensor_shape", "lines", "warnings"):
                known[name] = None if known.get(name) is None else tuple(known[name])
            known["warnings"] = known["warnings"] or ()
            known["suggestions"] = tuple(Suggestion(**each) for each in known.get("suggestions", ()))
            return cls(**known)
        except TypeError as error:
            raise InputError(f"diagnosis: {error}") from None
