"""`kerasmem.fit` and `kerasmem run`: recovery's steps, joined with streaming's positions and saved points."""
