"""Selected rows of a file, drawn by Hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st


@st.composite
def selections(draw):
    """Rows of a file: a run, or rising row numbers."""
    if draw(st.booleans()):
        start = draw(st.integers(0, 100))
        return range(start, start + draw(st.integers(1, 150)))
    return np.array(sorted(draw(st.sets(st.integers(0, 200), min_size=1))), np.int64)
