"""The trace of a run: what OUT.trace.jsonl holds for `apcbatch report`."""
