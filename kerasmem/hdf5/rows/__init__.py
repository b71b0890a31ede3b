"""Rows of datasets, through any number of files."""
