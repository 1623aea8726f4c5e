"""Trace of a run: OUT.trace.jsonl, which `apcbatch report` reads."""
