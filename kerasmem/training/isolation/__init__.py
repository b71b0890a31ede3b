"""Many models one after another: each in a process of its own, and of all of them only the best one's weights kept."""
