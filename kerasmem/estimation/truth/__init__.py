"""What did it really take? Rows of measured memory: their fields, a check of them, and how a machine adds its own."""
