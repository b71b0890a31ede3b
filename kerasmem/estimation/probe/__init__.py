"""Real steps in a process of its own: measured as they are, recorded one by one, or extrapolated to a larger batch."""
