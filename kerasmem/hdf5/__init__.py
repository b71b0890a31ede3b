"""HDF5 datasets as rows, in three layers: format, then io, then rows; each imports those before it alone."""
