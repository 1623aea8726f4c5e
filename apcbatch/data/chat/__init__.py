"""Chat: conversations become prompts through the chat template."""
