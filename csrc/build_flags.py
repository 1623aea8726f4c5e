"""Compiler flags of each source of the kernels, from the list in instruction_sets.h.

Each instruction set has translation units and flags of its own; which one runs is decided at run time. Nothing is built
with -march=native.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# -ffp-contract=off: a fused multiply-add happens where the source says so and nowhere else, which is what makes
# all instruction sets agree bit for bit.
ARITHMETIC = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi"]
OPENMP = "-fopenmp"
WITHOUT_OPENMP = "-Wno-unknown-pragmas"  # of a build with one thread

_ROW = re.compile(r"ISA\(argument, (\w+), \w+, \w+, \w+,((?:\s|APC_HAS\([\w-]+\))*)\)")


def instruction_sets() -> dict[str, list[str]]:
    """Return the processor features that each instruction set needs, the plainest set first."""
    text = (FOLDER / "instruction_sets.h").read_text().replace("\\\n", "\n").partition("#else")[0]
    return {name: re.findall(r"APC_HAS\(([\w-]+)\)", features) for name, features in _ROW.findall(text)}


def isa_flags(source: str | Path, machine: str) -> list[str]:
    """Return the flags of the instruction set in the source's name, none without one. machine: the target, as in
    platform.machine()."""
    name = Path(source).stem.rpartition("_")[2]
    features = instruction_sets().get(name)
    if features is None or machine not in ("x86_64", "AMD64"):
        return []
    return [f"-DAPC_ISA={name}", *(f"-m{feature}" for feature in features)]


def kernel_sources() -> list[Path]:
    """Return the sources that include neither Python nor CUDA."""
    return [path for path in sorted(FOLDER.glob("*.cpp")) if not path.stem.startswith("bindings")]
