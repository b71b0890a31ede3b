"""What to do so that training fits: remedies and combinations of them, each estimated anew on the changed model."""
