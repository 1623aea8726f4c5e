"""The prefix plan: what a dataset shares, in which order to work, what to keep and until when.

Must not know: torch, text, states. It reads token ids and bytes.
"""
