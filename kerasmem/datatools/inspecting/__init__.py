"""Contents, statistics and indexes of data files."""
