"""What became of a function that ran in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.errors import KerasmemError

FORMAT_VERSION = 1
DONE, OUT_OF_MEMORY, TIMED_OUT, DIED = "done", "out of memory", "timed out", "died"


@dataclass(frozen=True)
class IsolatedRun:
    """What became of a call in a process of its own.

    Attributes:
        status: "done", "out of memory", "timed out" or "died" (the process ended without an answer).
        value: what the function returned; None unless the status is "done".
        reason: in one line, why there is no value; None where there is one.
        diagnosis: of the failure where memory ran out and a message said so.
        device: whose allocator `peak_bytes` is of, such as "GPU:0"; None where TensorFlow was not used.
        peak_bytes: the most that the allocator of `device` had handed out at once; None where it is not known.
        host_peak_bytes: the most that the process had resident; None where it is not known.
        seconds: from the call to the end of the process.
    """

    status: str
    value: Any = None
    reason: str | None = None
    diagnosis: Diagnosis | None = None
    device: str | None = None
    peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    seconds: float = 0.0

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out, the device's or the host's."""
        return self.status == OUT_OF_MEMORY

    def get(self) -> Any:
        """Return the value.

        Raises:
            KerasmemError: there is none; the message says why.
        """
        if self.status != DONE:
            raise KerasmemError(f"no result: {self.status}" + ("" if self.reason is None else f" ({self.reason})"))
        return self.value

    def to_dict(self) -> dict[str, Any]:
        """Return all but the value as JSON-ready data, sizes in bytes."""
        data = {name: value for name, value in vars(self).items() if name not in ("value", "diagnosis")}
        diagnosis = None if self.diagnosis is None else self.diagnosis.to_dict()
        return {"format_version": FORMAT_VERSION, **data, "diagnosis": diagnosis}


@dataclass(frozen=True)
class Limits:
    """What a process of its own may take.

    Attributes:
        device_bytes: of each device's memory, for TensorFlow's allocator.
        host_bytes: of resident memory.
        seconds: of time.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the limits as plain data."""
        return asdict(self)
