"""Structured output: read it from a request, compile it to a grammar, and constrain the answer by the grammar."""
