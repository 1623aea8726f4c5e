"""Input: read the files that INPUT names as lines and rows, and check each one as a conversation."""
