"""Mutation tests of the Python code: see __main__.py. Nothing here is imported by the package or by its tests."""
