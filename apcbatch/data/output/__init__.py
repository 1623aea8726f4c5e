"""Output parsers: split generated text into content, reasoning and tool calls."""
