"""`apcbatch` with the fake engine, as a program of its own for the tests that kill and interrupt it."""

import sys

from apcbatch.cli import main
from apcbatch.job import opening
from tests.job.fakes import FakeEngine

if __name__ == "__main__":
    opening.make_engine = FakeEngine
    sys.exit(main())
