"""INPUT: files become lines, lines become checked conversations."""
