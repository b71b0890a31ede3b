"""From the recording of a step to its profile. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kerasmem.models.sizes import ModelFacts
from kerasmem.profiling.naming import NOT_KNOWN, UNNAMED, Named, Namer
from kerasmem.profiling.replaying import Chunk, StepReplay, thin
from kerasmem.profiling.results import LiveChunk, PeakBytes, ProfiledLayer, ProfileSettings, Share, StepProfile

WASTE = "waste in chunks"
MOST_LIVE = 200


def build_profile(
    replay: StepReplay,
    namer: Namer,
    model: ModelFacts,
    settings: ProfileSettings,
    rows: Sequence[ProfiledLayer],
    *,
    peaks: Sequence[int] = (),
    notes: Sequence[str] = (),
    formula: Mapping[str, int] | None = None,
) -> StepProfile:
    """Return the profile of a recorded step.

    Args:
        replay: the step.
        namer: names its chunks.
        model: facts of the model.
        settings: how the step was run.
        rows: the layers, in the order of the report.
        peaks: of all steps that ran, in bytes; the spread of the result.
        notes: how it was measured.
        formula: the hand formula, if it is known.
    """
    named = [(chunk, list(namer.name(chunk))) for chunk in replay.live]
    categories: Counter[str] = Counter({UNNAMED: replay.unknown})
    shares: Counter[str] = Counter({NOT_KNOWN: replay.unknown})
    layers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    known_rows = {row.name for row in rows}
    for chunk, parts in named:
        waste = chunk.allocated - sum(part.bytes for part in parts)
        categories["allocator"] += waste
        shares[WASTE] += waste
        for part in parts:
            categories[part.category] += part.bytes
            if part.layer in known_rows:
                layers[str(part.layer)][part.category] += part.bytes
            else:
                shares[part.share or str(part.layer)] += part.bytes
    unmodelled: list[Mapping[str, Any]] = []
    if replay.unknown:
        why = "in use when the step began, and neither the model's, nor its optimizer's, nor recorded"
        unmodelled.append({"what": "chunks from before the step", "why": why, "bytes": replay.unknown})
    requested = None if replay.unknown else sum(chunk.requested for chunk in replay.live)
    return StepProfile(
        model=model,
        settings=settings,
        bytes=PeakBytes(
            replay.peak, min(peaks, default=None), max(peaks, default=None),
            **{name: categories[name] for name in PeakBytes.CATEGORIES},
        ),
        layers=tuple(_filled(row, layers[row.name]) for row in rows),
        shares=tuple(Share(name, size) for name, size in shares.most_common() if size),
        instant=namer.instant(replay.operation),
        timeline=thin(replay.points),
        live=_largest(named),
        live_chunks=len(replay.live),
        before=replay.begin,
        requested=requested,
        events=len(replay.points) - 1,
        notes=tuple(notes),
        unmodelled=tuple(unmodelled),
        formula=formula,
    )  # fmt: skip


def _filled(row: ProfiledLayer, parts: Counter[str]) -> ProfiledLayer:
    total = sum(parts.values())
    return replace(row, bytes_at_peak=total, bytes=total, parts={name: size for name, size in parts.items() if size})


def _largest(named: Sequence[tuple[Chunk, list[Named]]]) -> tuple[LiveChunk, ...]:
    largest = []
    for chunk, parts in named:
        waste = chunk.allocated - sum(part.bytes for part in parts)
        shape = chunk.shape or ("" if chunk.tensor is None else chunk.tensor.shape)
        for part in parts:
            is_alone = len(parts) == 1
            size = part.bytes + (waste if is_alone else 0)
            largest.append(LiveChunk(size, part.bytes, part.category, part.layer, part.what, shape if is_alone else ""))
        if len(parts) > 1 and waste:
            largest.append(LiveChunk(waste, 0, "allocator", None, f"waste in a chunk of {len(parts)} values", ""))
    largest.sort(key=lambda chunk: -chunk.bytes)
    return tuple(largest[:MOST_LIVE])
