"""The families of messages, each in a module of its own with the rules that read its lines."""

from __future__ import annotations

from kerasmem.diagnosis.families import bfc, cuda, host, jax, others, pytorch, tensorflow, theano, xla
from kerasmem.diagnosis.rules import Rule

# The first rule that matches a line wins: what is no failure comes first, the particular before the general.
RULES: tuple[Rule, ...] = (
    *others.RULES,
    *tensorflow.RULES,
    *bfc.RULES,
    *pytorch.RULES,
    *xla.RULES,
    *jax.RULES,
    *theano.RULES,
    *cuda.RULES,
    *host.RULES,
)
