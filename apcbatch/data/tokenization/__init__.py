"""Tokenizers: text to token ids and back, untrusted ones in a helper process."""
