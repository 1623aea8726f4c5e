"""Data in: lines become records, records become prompts. Importing it loads neither torch nor transformers."""
