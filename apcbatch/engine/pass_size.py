"""How much goes into one pass, where several groups of sequences have passes under way side by side.

An example with two groups and 8192 tokens at most, so 4096 for a pass:
    6000 tokens of prompts are there: a pass takes half of them, the next one half of what is there then, so that each
    device has something to compute.
    20,000 are there: a pass takes 4096.
    1500 are there: a pass takes 1024, the next one the rest; fewer are not worth a pass of their own.

Must not know: sequences, tensors, what a pass costs.
"""

from __future__ import annotations

FEWEST_TOKENS = 1024  # of prompts in a pass, where more are there


class PassSize:
    """max_tokens: of the passes of all groups together, though each may have FEWEST_TOKENS. max_sequences: of a
    pass."""

    def __init__(self, max_tokens: int, max_sequences: int, groups: int) -> None:
        self._fewest = min(max_tokens, FEWEST_TOKENS)
        self._most, self._groups = max(max_tokens // groups, self._fewest), groups
        self.max_sequences = max_sequences

    def decodes(self, num_running: int) -> int:
        """How many decodes a pass has at most when so many sequences run: a group's share of them."""
        return min(self.max_sequences, -(-num_running // self._groups))

    def wanted(self, num_decodes: int, left: int) -> int:
        """How many more tokens of prompts may be let in for the next passes, beside the decodes of this one and `left`
        tokens of prompts that are in no pass."""
        return self._groups * max(1, self._most - num_decodes) - left

    def prompt_tokens(self, num_decodes: int, left: int) -> int:
        """How many of the `left` tokens of prompts a pass takes beside its decodes, at least one."""
        share = max(self._fewest, -(-left // self._groups))
        return max(1, min(share, self._most - num_decodes))
