"""XLA's plan for a GPU that is not there: NVIDIA's compiler in XLA, fed with a description of the card."""
