"""Rows of datasets across files."""
