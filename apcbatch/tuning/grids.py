"""The block sizes, in tokens, that `plan` and `tune-block-size` compare unless others are given. Imports nothing."""

BLOCK_SIZES = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
