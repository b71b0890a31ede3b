"""Bytes of files, local ones and those behind a URL."""
