"""`apcbatch` with the fake engine, as a program of its own for the tests that kill and interrupt it."""

import sys

import fsspec
from fsspec.implementations.local import LocalFileSystem

from apcbatch.cli import main
from apcbatch.job import opening
from tests.job.fakes import FakeEngine


class Far(LocalFileSystem):
    """far://, which all processes of a test see and the program takes for another machine's."""

    protocol = "far"


if __name__ == "__main__":
    fsspec.register_implementation("far", Far)
    opening.make_engine = FakeEngine
    sys.exit(main())
