"""The job: input lines in, result lines out, whatever happens between. Must not know: click."""
