"""`kerasmem.explain_oom`: a text, a log or an exception → a `Diagnosis`."""

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

_EVIDENCE = 400  # characters of the line that is kept
_NEAR, _BEFORE_STOP = 20, 200  # lines between an error and its reason, a death and what stopped the run
_CHAIN = 20  # exceptions behind one another


def explain_oom(text_or_exception: str | bytes | BaseException | os.PathLike[str]) -> Diagnosis:
    """Diagnose an out-of-memory error from a message, a log or an exception.

    Knows TensorFlow, XLA (GPU and TPU), PyTorch, JAX, Theano, cuDNN and cuBLAS, and the host: Python, NumPy, the
    kernel's OOM killer, Slurm, containers. What looks like it and is not (a full disk, a notice, another limit) is
    not called so. Where there are several failures the first is the cause. TensorFlow is not loaded.

    Args:
        text_or_exception: a text; an exception, whose causes are read too; or a path-like object (`pathlib.Path`) of
            a log, which is read in a stream whatever its size. A string is a path if such a file exists.

    Returns:
        A `Diagnosis`; sizes in bytes, what the text does not say is None.

    Raises:
        InputError: a path that cannot be read, or a compressed file.
        TypeError: it is none of these.

    Examples:
        >>> diagnosis = explain_oom("Error allocating 900 bytes of device memory (out of memory). "
        ...                         "Driver report 500 bytes free and 4000 bytes total")
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
    raise TypeError(f"explain_oom takes a text, an exception or a path, not {type(text_or_exception).__name__}")


def _is_path(text: str) -> bool:
    """Return whether a text names a file, or is one word that ends as logs do."""
    if "\n" in text:
        return False
    return os.path.isfile(text) or (text.endswith((".log", ".out", ".err", ".txt")) and not text.split()[1:])


def explain_file(path: str | os.PathLike[str]) -> Diagnosis:
    """Read a log of any size in a stream.

    Raises:
        InputError: If it cannot be read, or is compressed.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as stream:
            return explain_stream(stream, name=name)
    except (OSError, ValueError) as error:  # ValueError: a zero in the name
        raise InputError(f"{name!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def explain_stream(stream: BinaryIO, *, name: str = "the log") -> Diagnosis:
    """Read bytes until the first failure is over, in a stream.

    Raises:
        InputError: they are compressed.
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
    refused = [each for each in weak if each.what == "driver"]
    sizes = [each.facts.get("requested_bytes") or 0 for each in refused]
    if len(refused) > 1 and all(0.8 * a <= b < a for a, b in pairwise(sizes)):
        weak = [each for each in weak if each.what != "driver"]
        if not weak:
            return _other("notice", "shrinking", refused[0].first, refused[0].evidence)
    limits = [number for number, message, _ in others if message.family == "limit"]
    weak = [each for each in weak if each.what != "exhausted" or not _is_near(limits, each.first, _NEAR)]
    stops = [number for number, message, _ in others if message.family == "stopped"]
    if weak and not _is_near(stops, weak[0].first, _BEFORE_STOP):
        return _failure(weak[0])
    if others:
        ranks = {"notice": 0, "nan": 1}
        number, message, text = max(others, key=lambda other: (ranks.get(other[1].family, 2), other[0]))
        return _other(message.family, message.what, number, text)
    return Diagnosis(False, summary=other_sentence("", ""))


def _is_near(numbers: list[int], number: int, distance: int) -> bool:
    return any(abs(each - number) < distance for each in numbers)


def _other(family: str, what: str, place: int, text: str) -> Diagnosis:
    summary, evidence = other_sentence(family, what), text.strip()[:_EVIDENCE]
    return Diagnosis(False, family=family, summary=summary, lines=(place, place), evidence=evidence)


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
