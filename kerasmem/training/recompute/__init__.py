"""Recomputation: the choice of segments, and the model that recomputes them."""
