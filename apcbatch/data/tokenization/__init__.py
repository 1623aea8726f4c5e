"""Tokenizers: read them from a model folder, encode text to token ids and decode ids to text."""
