"""Export of the results of `plan` and `tune-block-size`, one module per format."""
