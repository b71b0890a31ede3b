"""Data bigger than memory: HDF5 files streamed to Keras as float32 batches."""
