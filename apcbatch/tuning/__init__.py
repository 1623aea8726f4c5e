"""What a run would reuse, and which block size is fastest here. Must not know: click."""
