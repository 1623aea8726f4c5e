"""What the process of a chat template and its parent say to each other, and the bounds that both keep to.

Must not know: jinja2, processes. A request is a length and `marshal` data from the parent, which is trusted: first the
template and its variables, then messages, tools, and how many of the messages each text is for. An answer, one per
text, is a letter, a length and UTF-8. The worst that it can be is a wrong text.
"""

from __future__ import annotations

import struct

CPU_SECONDS = 2  # of one text
MEMORY_BYTES = 1 << 30  # of addresses, Python itself included
MAX_CHARACTERS = 16 * 2**20  # a longer text is refused before it is tokenised: that takes up to 200 bytes a character
REASON_CHARACTERS = 500

REQUEST_HEAD, ANSWER_HEAD = struct.Struct("<Q"), struct.Struct("<cI")
# What an answer's letter says of its text: the prompt; the words of a template that refuses the messages or that is
# not valid; how many characters a prompt beyond MAX_CHARACTERS has; nothing, where memory ran out.
DONE, REFUSED, INVALID, TOO_LONG, NO_MEMORY = b"d", b"r", b"i", b"l", b"m"
