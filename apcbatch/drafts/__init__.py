"""Drafts for exact speculation: guesses of a running answer's next tokens, from known text."""
