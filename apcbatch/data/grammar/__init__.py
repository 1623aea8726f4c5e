"""Structured output: read from a request, and compiled to a grammar that constrains the answer."""
