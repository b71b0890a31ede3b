"""`kerasmem.explain_oom`: a text, a log or an exception → a `Diagnosis`."""

from __future__ import annotations

import gc
import io
import linecache
import os
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any, BinaryIO

from kerasmem.diagnosis.causes import failed_operation, failed_subject, figures
from kerasmem.diagnosis.diagnosis import Diagnosis
from kerasmem.diagnosis.failures import Collector, Failure
from kerasmem.diagnosis.log_lines import interesting_lines
from kerasmem.diagnosis.wording import DAMAGED, other_sentence, sentence, suggestions, with_kept_models
from kerasmem.errors import InputError
from kerasmem.models.freeing import kept_bytes

_EVIDENCE = 400  # characters of the line that is kept
_NEAR = 20  # lines between an error and its reason
_LONGEST_PATH = 4096
_CHAIN = 20  # exceptions behind one another
_NAMES = ("MemoryError", "OutOfMemoryError")  # exceptions that say all by their name


def explain_oom(text_or_exception: str | bytes | BaseException | os.PathLike[str]) -> Diagnosis:
    """Diagnose an out-of-memory error from a message, a log or an exception.

    Knows TensorFlow, XLA (GPU and TPU), PyTorch, JAX, Theano, cuDNN and cuBLAS, and the host: Python, NumPy, the
    kernel's OOM killer, Slurm, containers. What looks like it and is not (a full disk, a notice, another limit) is
    not called so. Where there are several failures the first is the cause. TensorFlow is not loaded.

    Args:
        text_or_exception: a text; an exception, whose causes are read too; or a path-like object (`pathlib.Path`) of
            a log, which is read in a stream whatever its size. A string is a text, never a path.

    Returns:
        A `Diagnosis`; sizes in bytes, what the text does not say is None.

    Raises:
        InputError: a path that cannot be read, or a compressed file.
        TypeError: it is none of these.

    Examples:
        >>> found = explain_oom("Error allocating 900 bytes of device memory (out of memory). "
        ...                     "Driver report 500 bytes free and 4000 bytes total")
        >>> found.family, found.requested_bytes, found.free_bytes, found.cause
        ('theano', 900, 500, 'capacity')
    """
    if isinstance(text_or_exception, BaseException):
        found = read_exception(text_or_exception)
        if not found.out_of_memory or found.family not in ("tensorflow", "xla"):
            return found
        gc.collect()
        return with_kept_models(found, kept_bytes())
    if isinstance(text_or_exception, str):
        if _is_path(text_or_exception):
            return explain_file(text_or_exception)
        return explain_stream(io.BytesIO(text_or_exception.encode("utf-8", "replace")))
    if isinstance(text_or_exception, (bytes, bytearray, memoryview)):
        return explain_stream(io.BytesIO(bytes(text_or_exception)))
    if isinstance(text_or_exception, os.PathLike):
        return explain_file(text_or_exception)
    raise TypeError(f"explain_oom takes a text, an exception or a path, not {type(text_or_exception).__name__}")


def _is_path(text: str) -> bool:
    """Return whether a text names a file, or is one word that ends as logs do."""
    if len(text) > _LONGEST_PATH or "\n" in text or "\0" in text:
        return False
    return os.path.isfile(text) or (text.endswith((".log", ".out", ".err", ".txt")) and not text.split()[1:])


def explain_file(path: str | os.PathLike[str]) -> Diagnosis:
    """Read a log.

    Raises:
        InputError: it cannot be read.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        raise InputError(f"{name}: is a folder; name a log")
    try:
        with open(name, "rb") as stream:
            return explain_stream(stream, name=name)
    except (OSError, ValueError) as error:  # ValueError: a zero in the name
        raise InputError(f"{name!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def explain_stream(stream: BinaryIO, *, name: str = "the log") -> Diagnosis:
    """Read bytes to their end, a megabyte at a time.

    Raises:
        InputError: they are compressed.
    """
    collector = Collector()
    collector.read(interesting_lines(stream, name=name, wanted=collector.wanted))
    return _diagnose(collector)


def read_exception(error: BaseException) -> Diagnosis:
    """Diagnose an exception as `explain_oom` does, without a search for other users of memory."""
    return explain_stream(io.BytesIO("\n".join(_exception_texts(error)).encode("utf-8", "replace")))


def _exception_texts(error: BaseException) -> Iterator[str]:
    """Return the exception's text as a traceback would end, then those of its causes; nothing raises on the way."""
    seen: set[int] = set()
    current: BaseException | None = error
    for _ in range(_CHAIN):
        if current is None or id(current) in seen:
            return
        seen.add(id(current))
        yield from _frames(current)
        name = type(current).__name__.lstrip("_")
        is_of_jax = type(current).__module__.split(".")[0] in ("jax", "jaxlib")
        text = _quietly(attrgetter("message"), current)
        text = text if isinstance(text, str) and text else _quietly(str, current) or ""
        if name in _NAMES and "out of memory" not in text.lower() and "allocat" not in text.lower():
            yield "MemoryError: " + text[:_EVIDENCE].replace("\n", " ")
        else:
            yield f"{'jax.errors.' * is_of_jax}{name}: {text}"
        operation = _quietly(attrgetter("op.name"), current)
        if isinstance(operation, str) and operation:
            yield f"[[{{{{node {operation}}}}}]]"
        if isinstance(group := _quietly(attrgetter("exceptions"), current), (tuple, list)) and group:
            yield from (f"{type(each).__name__}: {_quietly(str, each) or ''}" for each in group[:_CHAIN])
        current = current.__cause__ or current.__context__


def _frames(error: BaseException) -> Iterator[str]:
    """Yield the functions that raised, as a traceback lists them, with lines that set a batch size."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {number}, in {code.co_name}'
        if "batch_size" in (line := linecache.getline(code.co_filename, number)):
            yield line.rstrip()


def _quietly(read: Callable[[Any], Any], thing: Any) -> Any:
    """Return a part of an exception of any class, or None if reading it raises."""
    try:
        return read(thing)
    except Exception:
        return None


def _diagnose(collector: Collector) -> Diagnosis:
    stopped = [place for place, message, _ in collector.others if message.family == "stopped"]
    weak = collector.weak
    if collector.failures:
        return _failure(collector.failures[0], len(collector.failures) - 1 + collector.later)
    refused = [each for each in weak if each.what == "driver"]
    sizes = [each.facts.get("requested_bytes") or 0 for each in refused]
    if len(refused) > 1 and all(0.8 * a <= b < a for a, b in pairwise(sizes)):
        weak = [each for each in weak if each.what != "driver"]
        if not weak:
            return _other("notice", "shrinking", refused[0].first, refused[0].evidence)
    limits = [place for place, message, _ in collector.others if message.family == "limit"]
    weak = [each for each in weak if each.what != "exhausted" or not any(abs(n - each.first) < _NEAR for n in limits)]
    if weak and not any(abs(place - weak[0].first) < 200 for place in stopped):
        return _failure(weak[0], 0)
    if collector.others:
        ranks = {"notice": 0, "nan": 1}
        place, message, text = max(collector.others, key=lambda each: (ranks.get(each[1].family, 2), each[0]))
        return _other(message.family, message.what, place, text)
    return Diagnosis(False, summary="Nothing here says that memory ran out.")


def _other(family: str, what: str, place: int, text: str) -> Diagnosis:
    summary, evidence = other_sentence(family, what), text.strip()[:_EVIDENCE]
    return Diagnosis(False, family=family, summary=summary, lines=(place, place), evidence=evidence)


def _failure(failure: Failure, later: int) -> Diagnosis:
    found = figures(failure)
    operation, named = failed_operation(failure)
    subject = failed_subject(failure, operation, named.phase)
    facts = failure.facts
    return Diagnosis(
        True,
        family=failure.family,
        summary=sentence(failure, found, named.layer, named.phase, subject),
        requested_bytes=found.requested,
        free_bytes=found.free,
        largest_free_bytes=found.largest,
        limit_bytes=found.limit,
        in_use_bytes=found.in_use,
        reserved_bytes=found.reserved,
        device=facts.get("device"),
        tensor_shape=facts.get("tensor_shape"),
        dtype=facts.get("dtype"),
        operation=operation if named.layer or named.phase else None,
        layer=named.layer,
        pass_=named.phase,
        cause=found.cause,
        warnings=(DAMAGED,) if (failure.family, failure.what) == ("xla", "program") else (),
        suggestions=suggestions(failure, found, operation, named.phase, subject),
        lines=(failure.first, failure.last),
        evidence=failure.evidence.strip()[:_EVIDENCE],
        later_failures=later,
    )
