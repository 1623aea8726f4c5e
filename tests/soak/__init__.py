"""Random runs against cold ones, bit for bit: `make soak`, and a few draws in tests/test_sameness.py."""
