"""What reading alone gives: against raw reads, against decoding, against h5py's fancy indexing; and the bytes read."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from streaming_data import BATCH, MIB, NARROW, WIDE, Absent, Stored, cached_share, evict, load, make
from streaming_timing import CORES, Contestant, Decoding, Ours, Raw, ratio, rotate, rounded

Row = dict[str, Any]

SHUFFLED = "ours, shuffled"
_PACKED = (
    (NARROW, "gzip", "float32"), (NARROW, "gzip", "uint8"), (NARROW, "zstd", "float32"), (NARROW, "blosc", "float32"),
    (WIDE, "gzip", "float32"), (WIDE, "zstd", "float32"),
)  # fmt: skip
_DECODED = 64 * MIB  # of a file's chunks are decoded to time a decoder


def goal(what: str, value: float | dict[str, float], wanted: float, *, most: bool = False) -> Row:
    """Return a line of the summary: a measured value and the goal for it, the most allowed or the least.

    Where the value was taken in several ways, the goal is for the median.
    """
    ways = value if isinstance(value, dict) else {"median": value}
    met = ways["median"] <= wanted if most else ways["median"] >= wanted
    line = {"what": what, "value": ways["median"], "goal": f"{'≤' if most else '≥'} {wanted:g}", "met": bool(met)}
    return line | {way: ways[way] for way in ("best", "paired") if way in ways}


def plain(layout: str, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure contiguous or chunked float32, with the file in the page cache and not, against raw reads."""
    for shape in (NARROW, WIDE):
        stored = make(folder, shape, layout, options.megabytes)
        try:
            yield from _plain(stored, options)
        finally:
            Path(stored.path).unlink()


def _plain(stored: Stored, options: argparse.Namespace) -> Iterator[Row]:
    wanted = {SHUFFLED: 0.9}
    with closing(Raw(stored)) as raw, closing(Ours(stored, shuffle=True)) as shuffled:
        contestants: dict[str, Contestant] = {**raw.contestants(), SHUFFLED: shuffled.epoch}
        ours = {SHUFFLED: shuffled}
        if stored.layout == "contiguous":
            ours["ours, in order"] = ordered = Ours(stored, shuffle=False)
            contestants["ours, in order"] = ordered.epoch
            wanted["ours, in order"] = 0.95
        correct = {name: each.check() for name, each in ours.items()}
        for cache in ("warm", "cold"):
            before, states = _cache_of(stored, cache)
            rates = rotate(contestants, _rounds(options, cache), before, _least(options, cache))
            row = _row(stored, cache, states, rates, ours, correct)
            against = [name for name in contestants if name.startswith("raw")]
            row["ratios"] = {one: {base: ratio(rates[one], rates[base]) for base in against} for one in ours}
            row["summary"] = [
                goal(f"{_named(stored, cache)}: {one} / raw preadv", row["ratios"][one]["raw"], wanted[one])
                for one in ours
            ]
            yield _with_amplification(row, stored, cache, ours)
        for each in ours.values():
            each.close()


def packed(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure compressed data, shuffled, against as many one-core decoders as there are cores."""
    for shape, layout, dtype in _PACKED:
        if shape is WIDE and options.quick:
            continue
        try:
            stored = make(folder, shape, layout, max(32, options.megabytes // 4), dtype)
        except Absent as absent:
            yield {"layout": layout, "dtype": dtype, "shape": shape.name, "skipped": str(absent)}
            continue
        try:
            yield from _packed(stored, options)
        except ImportError as error:
            yield {**stored.to_dict(), "skipped": f"no decoder of its own to compare with: {error}"}
        finally:
            Path(stored.path).unlink()


def _packed(stored: Stored, options: argparse.Namespace) -> Iterator[Row]:
    decoding = Decoding(stored, _DECODED)
    with closing(Ours(stored, shuffle=True)) as shuffled:
        contestants: dict[str, Contestant] = {**decoding.contestants(), SHUFFLED: shuffled.epoch}
        correct = {SHUFFLED: shuffled.check()}
        for cache in ("warm", "cold"):
            before, states = _cache_of(stored, cache)
            rates = rotate(contestants, _rounds(options, cache), before, _least(options, cache))
            row = _row(stored, cache, states, rates, {SHUFFLED: shuffled}, correct)
            row |= {"decoder": decoding.library, "unshuffle": decoding.unshuffling}
            row["ratios"] = {SHUFFLED: {}}
            for base in decoding.contestants():
                times = 1 if "threads" in base else CORES
                name = base if times == 1 else f"{CORES} cores × {base}"
                row["ratios"][SHUFFLED][name] = ratio(rates[SHUFFLED], rates[base], times)
            name = f"{CORES} cores × decode"
            named = goal(f"{_named(stored, cache)}: {SHUFFLED} / {name}", row["ratios"][SHUFFLED][name], 0.8)
            row["summary"] = [named] if cache == "warm" else []  # the decoding reads nothing from the disk
            yield _with_amplification(row, stored, cache, {SHUFFLED: shuffled})


def fancy(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure shuffled epochs against h5py's fancy indexing of random rows, file in the page cache."""
    for layout, wanted in (("chunked", 30.0), ("contiguous", 5.0)):
        for shape in (NARROW, WIDE):
            stored = make(folder, shape, layout, options.megabytes)
            yield _fancy_row(stored, wanted, options)
            Path(stored.path).unlink()


def _fancy_row(stored: Stored, wanted: float, options: argparse.Namespace) -> Row:
    batches: list[int] = []
    with closing(Ours(stored, shuffle=True)) as shuffled, h5py.File(stored.path, "r") as file:
        other = _fancy(file["x"], options.seconds, batches)
        contestants: dict[str, Contestant] = {SHUFFLED: shuffled.epoch, "h5py fancy indexing": other}
        correct = {SHUFFLED: shuffled.check()}
        before, states = _cache_of(stored, "warm")
        rates = rotate(contestants, _rounds(options, "warm"), before, _least(options, "warm"))
        row = _row(stored, "warm", states, rates, {SHUFFLED: shuffled}, correct)
    row["fancy_batches"] = batches  # that its rates are taken from
    row["ratios"] = {SHUFFLED: {"h5py fancy indexing": ratio(rates[SHUFFLED], rates["h5py fancy indexing"])}}
    value = row["ratios"][SHUFFLED]["h5py fancy indexing"]
    row["summary"] = [goal(f"{_named(stored, 'warm')}: {SHUFFLED} / h5py fancy indexing", value, wanted)]
    return row


def _fancy(data: h5py.Dataset, seconds: float, batches: list[int]) -> Contestant:
    random = np.random.default_rng(0)

    def run() -> float:
        begin, done, size = time.perf_counter(), 0, 0
        while not done or time.perf_counter() - begin < seconds:
            size += data[np.sort(random.choice(len(data), BATCH, replace=False))].nbytes
            done += 1
        batches.append(done)
        return size / (time.perf_counter() - begin)

    return run


# ---- a result's parts


def _rounds(options: argparse.Namespace, cache: str) -> int:
    return options.repeats if cache == "warm" else max(2, options.repeats // 2)


def _least(options: argparse.Namespace, cache: str) -> float:
    """Return how long a measurement has to take; in a cold cache once through the file is all there is."""
    return 0.0 if cache == "cold" else min(0.3, options.seconds / 5)


def _named(stored: Stored, cache: str) -> str:
    return f"{stored.layout} {stored.dtype}, rows of {stored.shape.name}, {cache}"


def _cache_of(stored: Stored, cache: str) -> tuple[Callable[[], None] | None, list[float | None]]:
    """Return what to do before each measurement, and a list in which it notes which share of the file is cached."""
    states: list[float | None] = []
    load(stored.path)
    if cache == "warm":
        states.append(cached_share(stored.path))
        return None, states

    def before() -> None:
        evict(stored.path)
        states.append(cached_share(stored.path))

    return before, states


def _row(
    stored: Stored,
    cache: str,
    states: list[float | None],
    rates: dict[str, list[float]],
    ours: dict[str, Ours],
    correct: dict[str, bool],
) -> Row:
    known = [state for state in states if state is not None]
    return {
        **stored.to_dict(),
        "cache": cache,
        "cached_share_before": max(known) if known and cache == "cold" else min(known, default=None),
        "every_row_once": correct,
        "gb_per_second": rounded(rates),
        "first_batch_seconds": {name: each.first_batch[-len(rates[name]) :] for name, each in ours.items()},
        "read_ratio": {name: each.read_ratio[-len(rates[name]) :] for name, each in ours.items()},
    }


def _with_amplification(row: Row, stored: Stored, cache: str, ours: dict[str, Ours]) -> Row:
    """Add what was read an epoch; much less than 1 would be a head start taken between measurements."""
    row["counted_bytes"] = {name: each.counted() for name, each in ours.items()}
    row["summary"] += [
        goal(f"{_named(stored, cache)}: {name}, bytes read / stored", statistics.median(shares), 1.05, most=True)
        for name, shares in row["read_ratio"].items()
    ]
    for name, shares in row["read_ratio"].items():
        if min(shares) < 0.97:
            row.setdefault("warnings", []).append(f"{name}: an epoch read {min(shares)} of the file while it was timed")
    return row
