"""RUNS THAT GO ON: fit, run, resume, recompute, isolated processes; one notion of where a run stands."""
