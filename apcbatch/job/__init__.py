"""One run: read input lines, answer each request with an engine, write one result line per request."""
