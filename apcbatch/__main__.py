"""Run the command line: `python -m apcbatch` is `apcbatch`."""

import sys

from apcbatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
