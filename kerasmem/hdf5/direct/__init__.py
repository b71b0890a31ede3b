"""Read HDF5's stored bytes past the HDF5 library, whose global lock serialises threads."""
