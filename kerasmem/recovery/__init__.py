"""IT RAN OUT. NOW WHAT? Logs and exceptions → what ran out, why, and what to do about it."""
