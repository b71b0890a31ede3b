"""`kerasmem.explain_oom` diagnoses a text, a log or an exception."""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from itertools import pairwise
from typing import BinaryIO

from kerasmem.diagnosis.causes import failed_operation, failed_subject, figures
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.diagnosis.failure_reader import Collector, Failure
from kerasmem.diagnosis.log_messages import interesting_lines, read_data
from kerasmem.diagnosis.wording import other_sentence, sentence, suggestions
from kerasmem.errors import InputError

_EVIDENCE = 400  # characters
_NEAR, _BEFORE_STOP = 20, 200  # lines between an error and its reason, and between a kill and its reason
_CHAIN = 20  # chained exceptions


def explain_oom(text_or_exception: str | bytes | BaseException | os.PathLike[str]) -> Diagnosis:
    """Diagnose an out-of-memory error from a message, a log or an exception.

    Knows the messages of TensorFlow, XLA (GPU and TPU), PyTorch, JAX, Theano, cuDNN and cuBLAS, and of the host:
    Python, NumPy, the kernel's OOM killer, Slurm, containers. Similar messages (a full disk, a notice, another limit)
    are not reported as out of memory. If there are several failures, the first one counts. TensorFlow is not loaded.

    Args:
        text_or_exception: a text, an exception (with its causes), or the path of a log of any size. A string is a path
            if such a file exists.

    Returns:
        A `Diagnosis`. Sizes are bytes, or None if unknown.

    Raises:
        InputError: If the path cannot be read, or the file is compressed.
        TypeError: If the argument has another type.

    Examples:
        >>> import kerasmem
        >>> diagnosis = kerasmem.explain_oom("Error allocating 900 bytes of device memory (out of memory). "
        ...                                  "Driver report 500 bytes free and 4000 bytes total")
        >>> diagnosis.family, diagnosis.requested_bytes, diagnosis.free_bytes, diagnosis.cause
        ('theano', 900, 500, 'capacity')
    """
    if isinstance(text_or_exception, BaseException):
        return read_exception(text_or_exception)
    if isinstance(text_or_exception, str) and not _is_path(text_or_exception):
        text_or_exception = text_or_exception.encode("utf-8", "replace")
    if isinstance(text_or_exception, (bytes, bytearray, memoryview)):
        return explain_stream(io.BytesIO(text_or_exception))
    if isinstance(text_or_exception, (str, os.PathLike)):
        return explain_file(text_or_exception)
    raise TypeError(
        f"text_or_exception must be a text, an exception or a path; got {type(text_or_exception).__name__}."
    )


def _is_path(text: str) -> bool:
    """Return whether a text is the path of a file, or one word with the suffix of a log."""
    if "\n" in text:
        return False
    return os.path.isfile(text) or (text.endswith((".log", ".out", ".err", ".txt")) and not text.split()[1:])


def explain_file(path: str | os.PathLike[str]) -> Diagnosis:
    """Diagnose a log of any size.

    Raises:
        InputError: If the log cannot be read, or is compressed.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as stream:
            return explain_stream(stream, name=name)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{name!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def explain_stream(stream: BinaryIO, *, name: str = "the log") -> Diagnosis:
    """Diagnose a stream of bytes, which is read up to the end of the first failure.

    Raises:
        InputError: If the bytes are compressed.
    """
    collector = Collector()
    collector.read(interesting_lines(stream, name=name, wanted=collector.wanted))
    return _diagnose(collector)


def read_exception(error: BaseException) -> Diagnosis:
    """Diagnose an exception and its causes by their traceback."""
    lines = list(traceback.TracebackException.from_exception(error).format())
    current: BaseException | None = error
    for _ in range(_CHAIN):
        with contextlib.suppress(Exception):  # TensorFlow's errors know their operation
            lines.append(f"[[{{{{node {current.op.name}}}}}]]")  # type: ignore[union-attr]
        current = current and (current.__cause__ or current.__context__)
    return explain_stream(io.BytesIO("\n".join(lines).encode("utf-8", "replace")))


def _diagnose(collector: Collector) -> Diagnosis:
    if collector.failure is not None:
        return _failure(collector.failure)
    weak, others = collector.weak, collector.others
    refused = [failure for failure in weak if failure.what == "driver"]
    sizes = [failure.facts.get("requested_bytes") or 0 for failure in refused]
    if len(refused) > 1 and all(0.8 * a <= b < a for a, b in pairwise(sizes)):
        weak = [failure for failure in weak if failure.what != "driver"]
        if not weak:
            return _other("notice", "shrinking", refused[0].first, refused[0].evidence)
    limits = [number for number, message, _ in others if message.family == "limit"]
    weak = [failure for failure in weak if failure.what != "exhausted" or not _is_near(limits, failure.first, _NEAR)]
    stops = [number for number, message, _ in others if message.family == "stopped"]
    if weak and not _is_near(stops, weak[0].first, _BEFORE_STOP):
        return _failure(weak[0])
    if others:
        ranks = {"notice": 0, "nan": 1}
        number, message, text = max(others, key=lambda other: (ranks.get(other[1].family, 2), other[0]))
        return _other(message.family, message.what, number, text)
    return Diagnosis(False, summary=other_sentence("", ""))


def _is_near(numbers: list[int], number: int, distance: int) -> bool:
    return any(abs(other - number) < distance for other in numbers)


def _other(family: str, what: str, line: int, text: str) -> Diagnosis:
    summary, evidence = other_sentence(family, what), text.strip()[:_EVIDENCE]
    return Diagnosis(False, family=family, summary=summary, lines=(line, line), evidence=evidence)


def _failure(failure: Failure) -> Diagnosis:
    sizes = figures(failure)
    operation, named = failed_operation(failure)
    subject = failed_subject(failure, operation, named.phase)
    facts = failure.facts
    return Diagnosis(
        True,
        family=failure.family,
        summary=sentence(failure, sizes, named, subject),
        requested_bytes=sizes.requested,
        free_bytes=sizes.free,
        largest_free_bytes=sizes.largest,
        limit_bytes=sizes.limit,
        in_use_bytes=sizes.in_use,
        reserved_bytes=sizes.reserved,
        device=facts.get("device"),
        tensor_shape=facts.get("tensor_shape"),
        dtype=facts.get("dtype"),
        operation=operation if named.layer or named.phase else None,
        layer=named.layer,
        pass_=named.phase,
        cause=sizes.cause,
        warnings=(read_data("texts")["damaged"],) if (failure.family, failure.what) == ("xla", "program") else (),
        suggestions=suggestions(failure, sizes, operation, named.phase, subject),
        lines=(failure.first, failure.last),
        evidence=failure.evidence.strip()[:_EVIDENCE],
    )
