"""What `plan` and `tune-block-size` found, one module per format. Must not know: how it was found, where it goes."""
