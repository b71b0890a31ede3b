"""Recomputation: which parts of a model to compute twice rather than keep, and the model that does so."""
