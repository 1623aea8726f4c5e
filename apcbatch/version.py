"""The package's version: one constant, read by packaging and by the command line."""

VERSION = "0.1.0"
