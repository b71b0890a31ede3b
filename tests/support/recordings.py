"""What recordings of an allocator have to be like."""

from __future__ import annotations

from kerasmem.devices.recording import ALLOCATE


def check_complete(events):
    """Return how many events do not follow from the one before: recorded out of order, or with others lost between.

    Each event says what is in use after it, so a complete recording from the allocator's start on gives 0.
    """
    wrong, in_use = 0, 0
    for event in events:
        in_use += event.allocated if event.kind == ALLOCATE else -event.allocated
        if in_use != event.in_use:
            wrong, in_use = wrong + 1, event.in_use
    return wrong
