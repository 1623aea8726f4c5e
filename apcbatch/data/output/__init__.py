"""Output parsers: generated text becomes content, reasoning and tool calls."""
