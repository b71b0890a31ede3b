"""HDF5 datasets as rows: layout, chunk index, codecs, direct reads, files by URL."""
