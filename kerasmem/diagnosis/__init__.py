"""Diagnoses logs and exceptions: cause and suggestions."""
