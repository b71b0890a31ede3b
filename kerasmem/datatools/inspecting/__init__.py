"""What is in a file, and what it is good for: contents, statistics, speed."""
