"""One real step, allocation by allocation: what is in memory at its peak, in the words of Keras."""
