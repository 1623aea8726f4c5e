"""Drafts for exact speculation: the likely next tokens of a running answer, found in known text."""
