"""The bounds of a chat template's texts, and what its process says of one besides DONE and REFUSED.

Must not know: jinja2, processes. The first request of data/template_child.py is the template, its variables and the
seconds of a text; each later one is messages, tools, how many of the messages each text is for, and variables of its
own. One answer comes for each text.
"""

from __future__ import annotations

CPU_SECONDS = 2  # of one text
MEMORY_BYTES = 1 << 30  # of addresses, Python itself included
MAX_CHARACTERS = 16 * 2**20  # a longer text is refused before it is tokenised: that takes up to 200 bytes a character

# The words of a template that is not valid; how many characters a prompt beyond MAX_CHARACTERS has; nothing, where
# memory ran out.
INVALID, TOO_LONG, NO_MEMORY = b"i", b"l", b"m"
