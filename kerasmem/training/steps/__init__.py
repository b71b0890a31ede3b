"""Training that survives running out of memory: the step again from a good copy, in smaller pieces."""
