"""Chat: render conversations to prompts with the chat template."""
