"""Which row goes where: exact shares, drawn at random row by row in bounded memory. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kerasmem.errors import UsageError

_USUAL = {2: ("train", "val"), 3: ("train", "val", "test")}
_DRAW, _GROUPS = 1, 2  # which of the random streams


def read_split(value: Any) -> dict[str, float]:
    """Return the shares by name; one of 1 called "" where nothing is split.

    Args:
        value: None, "0.8,0.1,0.1", "train=0.8,test=0.2", or the same as a list or a mapping.

    Raises:
        UsageError: these are no shares that add up to 1.

    Examples:
        >>> read_split("0.8,0.2")
        {'train': 0.8, 'val': 0.2}
    """
    if value is None:
        return {"": 1.0}
    if isinstance(value, Mapping):
        pairs = [(str(name), share) for name, share in value.items()]
    else:
        entries = value.split(",") if isinstance(value, str) else list(value) if np.iterable(value) else [value]
        texts = [str(entry).strip() for entry in entries]
        if all("=" in text for text in texts):
            pairs = [(text.split("=", 1)[0].strip(), text.split("=", 1)[1]) for text in texts]
        else:
            names = _USUAL.get(len(texts), tuple(f"part{number}" for number in range(1, len(texts) + 1)))
            pairs = list(zip(names, texts, strict=True))
    shares = {}
    for name, share in pairs:
        try:
            number = float(share)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < 1:
            raise UsageError(f"split: {share!r} is no share between 0 and 1; write for example '0.8,0.1,0.1'")
        if not name or not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise UsageError(f"split: {name!r} cannot be part of a file's name; use letters and digits")
        if name in shares:
            raise UsageError(f"split: {name!r} is named twice")
        shares[name] = number
    if len(shares) < 2 or abs(sum(shares.values()) - 1) > 1e-6:
        raise UsageError(f"split: the shares {list(shares.values())} do not add up to 1; write for example '0.8,0.2'")
    return shares


def share_out(count: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers that add up to `count` and come closest to the shares.

    Examples:
        >>> share_out(10, [0.75, 0.25])
        [8, 2]
    """
    exact = [count * share for share in shares]
    whole = [math.floor(part + 1e-9) for part in exact]
    rest = sorted(range(len(shares)), key=lambda k: (whole[k] - exact[k], k))
    for k in rest[: count - sum(whole)]:
        whole[k] += 1
    return whole


class RandomSplit:
    """Exact shares of all rows, or of the rows of each class, drawn as from an urn without putting back.

    Like `GroupedSplit` it says for the rows of each piece, asked one after another from the first, to which part they
    go.

    Args:
        counts: rows of each class, by key; {0: rows} where classes do not count.
        shares: the share of each part.
        seed: of the draw.
    """

    def __init__(self, counts: Mapping[int, int], shares: Sequence[float], seed: int) -> None:
        self._keys = np.array(sorted(counts), np.int64)
        self._left = np.array([share_out(counts[key], shares) for key in self._keys.tolist()], np.int64)
        self.sizes = self._left.sum(axis=0).tolist()
        self._seed = seed

    def deal(self, piece: int, keys: np.ndarray | None, rows: int) -> np.ndarray:
        """Return the number of the part of each row.

        Args:
            piece: number of the piece.
            keys: the rows' values in the column that counts, if there is one.
            rows: how many rows the piece has.
        """
        rng = np.random.default_rng((self._seed, _DRAW, piece))
        classes = np.zeros(rows, np.int64) if keys is None else np.searchsorted(self._keys, keys)
        parts = np.empty(rows, np.uint8)
        by_class = np.argsort(classes, kind="stable")
        found, starts = np.unique(classes[by_class], return_index=True)
        for number, start, stop in zip(found.tolist(), starts.tolist(), [*starts[1:].tolist(), rows], strict=True):
            taken = _draw(rng, self._left[number], stop - start)
            self._left[number] -= taken
            dealt = np.repeat(np.arange(len(taken), dtype=np.uint8), taken)
            rng.shuffle(dealt)
            parts[by_class[start:stop]] = dealt
        return parts

    def state(self) -> Any:
        """Return what has to be known to go on with the next piece: what is left of the urns."""
        return self._left.tolist()

    def restore(self, state: Any) -> None:
        """Go on from what `state` returned."""
        self._left = np.array(state, np.int64).reshape(self._left.shape)


class GroupedSplit:
    """Whole groups: all rows of one go to the same part, and the parts come close to their shares.

    Args:
        counts: rows of each group, by key.
        shares: the share of each part.
        seed: of the order in which groups are dealt.
    """

    def __init__(self, counts: Mapping[int, int], shares: Sequence[float], seed: int) -> None:
        if len(counts) < len(shares):
            raise UsageError(f"group: {len(counts)} groups cannot be split into {len(shares)} parts")
        self._keys = np.array(sorted(counts), np.int64)
        sizes = np.array([counts[key] for key in self._keys.tolist()], np.int64)
        order = np.random.default_rng((seed, _GROUPS)).permutation(len(sizes))
        order = order[np.argsort(-sizes[order], kind="stable")]  # large ones first, so that small ones level out
        wanted = sizes.sum() * np.array(shares)
        self._parts = np.zeros(len(sizes), np.uint8)
        got = np.zeros(len(shares), np.int64)
        empty = set(range(len(shares)))
        for place, group in enumerate(order.tolist()):
            # no part stays empty: the last groups go to those that have none
            candidates = empty if len(order) - place <= len(empty) else range(len(shares))
            part = max(candidates, key=lambda k: (wanted[k] - got[k], -k))
            self._parts[group] = part
            got[part] += sizes[group]
            empty.discard(part)
        self.sizes = got.tolist()

    def deal(self, piece: int, keys: np.ndarray | None, rows: int) -> np.ndarray:
        """Return the number of the part of each row."""
        assert keys is not None
        return self._parts[np.searchsorted(self._keys, keys)]

    def state(self) -> Any:
        """Return None: a row's group says it all."""

    def restore(self, state: Any) -> None:
        """Nothing to be restored."""


def _draw(rng: np.random.Generator, left: np.ndarray, count: int) -> np.ndarray:
    """Return how many of `count` rows go to each part, hypergeometric; NumPy's own stops at 10**9."""
    taken = np.zeros(len(left), np.int64)
    remaining = int(left.sum())
    for part, room in enumerate(left.tolist()):
        if not count or not remaining:
            break
        other = remaining - room
        if other == 0:
            got = count
        elif room == 0:
            got = 0
        elif max(room, other) < 10**9:
            got = int(rng.hypergeometric(room, other, count))
        else:  # a piece is nothing against so many rows, and the two limits keep it exact in the sum
            got = min(room, max(count - other, int(rng.binomial(count, room / remaining))))
        taken[part] = got
        count -= got
        remaining = other
    return taken
