"""Input and output text: read lines, render and tokenise prompts, parse answers.

Importing it loads neither torch nor transformers.
"""
