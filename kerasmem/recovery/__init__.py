"""`kerasmem.advise`: remedies and combinations of them, each estimated on the changed model."""
