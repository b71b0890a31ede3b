"""Result of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass

from kerasmem.records import Record, json_field


@dataclass(frozen=True)
class Suggestion:
    """One suggestion for this failure.

    Attributes:
        what: the change, in a few words.
        why: its effect, with the figures of the failure.
        code: Python code or a shell command to paste.
    """

    what: str
    why: str
    code: str


@dataclass(frozen=True)
class Diagnosis(Record, what="diagnosis", version=1, rows="suggestions"):
    """Diagnosis of a failure. Sizes are bytes, or None if unknown.

    Attributes:
        out_of_memory: whether memory ran out.
        family: source of the error: "tensorflow", "xla", "pytorch", "jax", "theano", "cuda" or "host". If memory did
            not run out, another error: "disk", "notice", "limit", "shape", "nan", "library", "stopped" or "crash".
            None if no known message was found.
        summary: the failure in one sentence.
        requested_bytes: size of the allocation that failed.
        free_bytes: free memory at that time.
        largest_free_bytes: the largest free block.
        limit_bytes: memory of the card, or limit of the allocator, the job or the container.
        in_use_bytes: memory in use by the allocator.
        reserved_bytes: memory reserved by the allocator, in use or not.
        device: name in the text, such as "GPU:0", "TPU" or "host".
        tensor_shape: shape of the tensor or array that could not be allocated.
        dtype: its type.
        operation: operation that failed, as named by TensorFlow or XLA.
        layer: Keras layer of the operation.
        pass_: "forward", "backward", "optimizer" or None; "pass" in the JSON.
        cause: "capacity", "fragmentation", "other process" or "unknown"; None if memory did not run out.
        warnings: important warnings.
        suggestions: two or three, the most useful first.
        lines: first and last line of the failure in the text, from 1.
        evidence: the line with the error, as untrusted text.
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
    pass_: str | None = json_field("pass", None)
    cause: str | None = None
    warnings: tuple[str, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    lines: tuple[int, int] | None = None
    evidence: str | None = None

    @property
    def answer(self) -> str:
        """Same as `summary`."""
        return self.summary
