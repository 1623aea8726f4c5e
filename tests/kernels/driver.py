"""Builds tests/kernels/driver.cpp and the kernels as a program without Python: what the sanitizers and the check of
other compilers run."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from csrc.build_flags import ARITHMETIC, isa_flags, kernel_sources

ROOT = Path(__file__).resolve().parents[2]


def build_driver(compiler: str, flags: list[str], plain_flags: list[str], machine: str, folder: Path) -> Path:
    """The program, in the folder. machine: the target, as platform.machine() names it; plain_flags come last for the
    sources of plain code, whose kernels take the longest. CalledProcessError if a source does not compile."""
    flags = ["-std=c++17", *ARITHMETIC, "-Icsrc", *flags]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        own = isa_flags(source, machine) + (plain_flags if source.stem.endswith("_plain") else [])
        subprocess.run([compiler, *flags, *own, "-c", str(source), "-o", target], check=True, cwd=ROOT)
        return target

    sources = [ROOT / "tests" / "kernels" / "driver.cpp", *kernel_sources()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "driver"
    subprocess.run([compiler, *flags, *objects, "-ldl", "-o", str(program)], check=True)
    return program
