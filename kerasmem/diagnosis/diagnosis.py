"""What was found in a log or an exception, as plain results."""

from __future__ import annotations

from dataclasses import dataclass

from kerasmem.records import Record, renamed


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
class Diagnosis(Record, what="diagnosis", version=1, rows="suggestions"):
    """The diagnosis of a failure; sizes in bytes, None if unknown.

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
    pass_: str | None = renamed("pass", None)
    cause: str | None = None
    warnings: tuple[str, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    lines: tuple[int, int] | None = None
    evidence: str | None = None

    @property
    def answer(self) -> str:
        """Same as `summary`."""
        return self.summary
