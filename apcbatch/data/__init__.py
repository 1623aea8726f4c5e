"""Data in: lines become records, records become prompts. Imports neither torch nor transformers by itself."""
