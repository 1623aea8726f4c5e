"""The block sizes that `plan` and `tune-block-size` compare unless others are given, in tokens. Imports nothing."""

BLOCK_SIZES = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
