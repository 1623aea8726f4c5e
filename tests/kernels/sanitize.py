"""Builds the kernels and tests/kernels/driver.cpp with the address and undefined-behaviour sanitizers and runs it:
python -m tests.kernels.sanitize --seconds 20. Needs g++ and its libasan and libubsan; neither torch nor Python.h."""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import subprocess
import tempfile
from pathlib import Path

from csrc.build_flags import OPENMP
from tests.kernels.driver import build_driver

FLAGS = ["-g1", "-O1", OPENMP, "-Wno-psabi", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
PLAIN_FLAGS = ["-O0"]  # at -O1 the plain scan alone takes half a minute


def main() -> None:
    """Build and run; ends with the driver's status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build_driver("g++", FLAGS, PLAIN_FLAGS, platform.machine(), Path(folder))
        print(f"driver {arguments.seconds} {arguments.seed}", flush=True)
        options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}  # libgomp keeps its pool
        command = [str(program), str(arguments.seconds), str(arguments.seed)]
        ended = subprocess.run(command, check=False, env=os.environ | options)
    raise SystemExit(ended.returncode)


if __name__ == "__main__":
    main()
