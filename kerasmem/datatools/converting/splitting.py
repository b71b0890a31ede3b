"""Split rows into parts of exact shares, drawn at random in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kerasmem.errors import UsageError

_USUAL = {2: ("train", "val"), 3: ("train", "val", "test")}
_DRAW = 1  # which of the random streams
_MOST_DRAWN = 10**9  # rows from which NumPy draws; of more, each piece gets its exact share


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
    """Draw the part of each row at random, without replacement, so that shares are exact.

    Args:
        rows: number of rows.
        shares: the share of each part.
        seed: of the draw.

    Attributes:
        sizes: rows of each part.
    """

    def __init__(self, rows: int, shares: Sequence[float], seed: int) -> None:
        self.sizes = share_out(rows, shares)
        self._left = np.array(self.sizes, np.int64)
        self._seed = seed

    def deal(self, piece: int, rows: int) -> np.ndarray:
        """Return the number of the part of each row of the next piece.

        Args:
            piece: its number; pieces are dealt in order.
            rows: its rows.
        """
        rng = np.random.default_rng((self._seed, _DRAW, piece))
        taken = _draw(rng, self._left, rows)
        self._left -= taken
        parts = np.repeat(np.arange(len(taken), dtype=np.uint8), taken)
        rng.shuffle(parts)
        return parts

    def state(self) -> Any:
        """Return what has to be known to go on with the next piece: what is left of the urns."""
        return self._left.tolist()

    def restore(self, state: Any) -> None:
        """Go on from what `state` returned."""
        self._left = np.array(state, np.int64).reshape(self._left.shape)


def _draw(rng: np.random.Generator, left: np.ndarray, count: int) -> np.ndarray:
    """Return how many of `count` rows go to each part."""
    total = int(left.sum())
    if total < _MOST_DRAWN:
        return rng.multivariate_hypergeometric(left, count, method="marginals")
    return np.array(share_out(count, (left / total).tolist()), np.int64)
