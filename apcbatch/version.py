"""The package's version: one constant, read by packaging and by the command line."""

VERSION = "0.2.0"
