"""One real step, allocation by allocation: its peak in the terms of Keras."""
