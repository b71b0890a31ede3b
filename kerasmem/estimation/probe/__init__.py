"""Real steps in a process of its own: measured as they are, or extrapolated to a batch that was not run."""
