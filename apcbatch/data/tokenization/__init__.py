"""Tokenizers: encode text to token ids and decode ids to text, with untrusted tokenizers in a helper process."""
