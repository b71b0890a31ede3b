"""Recomputation: the choice of segments to compute twice, and the model that does so."""
