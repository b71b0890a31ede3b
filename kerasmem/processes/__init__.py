"""Child processes: start, talk to, limit, end, and say why one ended."""
