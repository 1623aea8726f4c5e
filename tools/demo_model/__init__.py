"""The parts of the bundled model: its weights, its tokenizer and its chat template."""
