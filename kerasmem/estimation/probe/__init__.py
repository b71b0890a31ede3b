"""Real steps in a subprocess: measured, recorded one by one, or extrapolated to a larger batch."""
