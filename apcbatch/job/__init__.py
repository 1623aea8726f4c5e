"""The job: input lines in, result lines out, whatever happens in between. Must not know: click."""
