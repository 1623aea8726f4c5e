"""Records of a tide gauge."""
