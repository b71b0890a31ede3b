"""WHY DID IT RUN OUT? Logs and exceptions → what ran out, why, and what to do about it."""
