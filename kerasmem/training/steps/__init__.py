"""Training steps that are repeated in smaller pieces if they run out of memory."""
