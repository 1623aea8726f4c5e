"""Builds the kernels with each compiler that is here, every warning an error, and runs tests/kernels/driver.cpp:
python -m tests.kernels.portability --seconds 2. GCC with OpenMP and without it, Clang, and plain code for aarch64,
which runs where qemu-aarch64-static is. What is missing is left out with a sentence. On Debian: apt-get install clang
libomp-dev g++-aarch64-linux-gnu qemu-user-static."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from csrc.build_flags import FOLDER, OPENMP, WARNINGS, WITHOUT_OPENMP
from tests.kernels.driver import build_driver


@dataclass(frozen=True)
class Build:
    """One compiler and its flags. machine: the target; runner: the command that runs another machine's programs."""

    name: str
    compiler: str
    flags: tuple[str, ...]
    machine: str = platform.machine()
    runner: tuple[str, ...] = ()


BUILDS = [
    Build("GCC", "g++", ("-O3", OPENMP)),
    Build("GCC without OpenMP", "g++", ("-O1", WITHOUT_OPENMP)),
    Build("Clang", "clang++", ("-O1", OPENMP)),
    Build(
        "GCC for aarch64", "aarch64-linux-gnu-g++", ("-O1", OPENMP), "aarch64",
        ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"),
    ),
]  # fmt: skip


def check(build: Build, seconds: float, seed: int) -> None:
    """Build the driver and run it. CalledProcessError where one of them fails."""
    if shutil.which(build.compiler) is None:
        print(f"{build.name}: left out, as there is no {build.compiler}", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = [*build.flags, *WARNINGS, "-Werror"]
        program = build_driver(build.compiler, flags, [], build.machine, Path(folder))
        if build.runner and shutil.which(build.runner[0]) is None:
            print(f"{build.name}: builds; not run, as there is no {build.runner[0]}", flush=True)
            return
        print(f"{build.name}: builds; driver {seconds} {seed}", flush=True)
        subprocess.run([*build.runner, str(program), str(seconds), str(seed)], check=True)


def check_bindings() -> None:
    """Compile what knows Python, without making code. CalledProcessError if a source has a warning."""
    if importlib.util.find_spec("pybind11") is None:
        print("bindings: left out, as there is no pybind11", flush=True)
        return
    import pybind11

    includes = [f"-I{path}" for path in (FOLDER, sysconfig.get_path("include"))]
    system = ["-isystem", pybind11.get_include()]
    for source in sorted(FOLDER.glob("bindings*.cpp")):
        command = ["g++", "-std=c++17", "-fsyntax-only", *WARNINGS, "-Werror", *includes, *system, str(source)]
        subprocess.run(command, check=True)
    print("bindings: no warnings", flush=True)


def main() -> None:
    """All builds; ends with 1 at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    check_bindings()
    for build in BUILDS:
        check(build, arguments.seconds, arguments.seed)


if __name__ == "__main__":
    main()
