"""Diagnosis of logs and exceptions: the cause, and suggestions."""
