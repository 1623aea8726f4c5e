"""Builds the kernels and tests/kernels/driver.cpp with the address and undefined-behaviour sanitizers and runs it:
python -m tests.kernels.sanitize --seconds 20. Needs g++ and its libasan and libubsan; neither torch nor Python.h."""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from csrc.build_flags import ARITHMETIC, OPENMP, isa_flags, kernel_sources

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "-std=c++17", "-g1", OPENMP, *ARITHMETIC, "-Wno-psabi", "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all", "-Icsrc",
]  # fmt: skip


def compile_one(source: Path, folder: Path) -> Path:
    """The object file of one source. CalledProcessError if it does not compile."""
    level = "-O0" if source.stem.endswith("_plain") else "-O1"  # at -O1 the plain scan alone takes half a minute
    target = folder / f"{source.stem}.o"
    flags = isa_flags(source, platform.machine())
    command = ["g++", *FLAGS, level, *flags, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True, cwd=ROOT)
    return target


def main() -> None:
    """Build and run; ends with the driver's status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(name)
        driver = ROOT / "tests" / "kernels" / "driver.cpp"
        objects = list(pool.map(lambda source: compile_one(source, folder), [driver, *kernel_sources()]))
        program = str(folder / "driver")
        subprocess.run(["g++", *FLAGS, *map(str, objects), "-ldl", "-o", program], check=True)
        print(f"driver {arguments.seconds} {arguments.seed}", flush=True)
        options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}  # libgomp keeps its pool
        command = [program, str(arguments.seconds), str(arguments.seed)]
        ended = subprocess.run(command, check=False, env=os.environ | options)
    raise SystemExit(ended.returncode)


if __name__ == "__main__":
    main()
