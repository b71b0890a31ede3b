"""IT RAN OUT. NOW WHAT? Remedies and combinations of them, each estimated on the changed model."""
