"""Builds the private extension apcbatch._C.

The kernels are plain C++ over pointers and strides, and the bindings take addresses, so nothing here needs
torch: one build serves every torch. Each instruction set is its own translation unit with its own flags and the
choice is made at run time; nothing is built with -march=native.
"""

from __future__ import annotations

import platform
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CSRC = Path("csrc")

# -ffp-contract=off: a fused multiply-add happens where the source says so and nowhere else, which is what makes
# all instruction sets agree bit for bit.
COMMON_FLAGS = [
    "-O3",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
AVX2_FLAGS = ["-mavx2", "-mfma"]
# GCC 12 calls the undefined registers of its own AVX-512 header uninitialised.
AVX512_FLAGS = [
    *AVX2_FLAGS,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-Wno-maybe-uninitialized",
]
ISA_FLAGS = {
    "_avx2": AVX2_FLAGS,
    "_avx512": AVX512_FLAGS,
    "_avx512bf16": [*AVX512_FLAGS, "-mavx512bf16"],
}


def isa_flags(source: str) -> list[str]:
    """Compiler flags of one source: those of the instruction set its name ends with, if any."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    stem = Path(source).stem
    for suffix, flags in ISA_FLAGS.items():
        if stem.endswith(suffix):
            return flags
    return []


class BuildExt(build_ext):
    """build_ext with the flags of `isa_flags` added source by source."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def compile_with_isa(obj, src, ext, cc_args, extra_postargs, pp_opts):
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *isa_flags(src)], pp_opts)

        self.compiler._compile = compile_with_isa
        super().build_extensions()


extension = Pybind11Extension(
    "apcbatch._C",
    sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).glob("*.cpp")),
    depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).glob("*.h")),
    include_dirs=[str(CSRC)],
    extra_compile_args=COMMON_FLAGS,
    extra_link_args=["-fopenmp"],
    cxx_std=17,
)

setup(
    packages=[
        "apcbatch",
        "apcbatch.cli",
        "apcbatch.configs",
        "apcbatch.data",
        "apcbatch.demo",
        "apcbatch.engine",
        "apcbatch.job",
        "apcbatch.kernels",
        "apcbatch.model",
        "apcbatch.store",
    ],
    package_dir={"apcbatch.configs": "configs"},
    package_data={
        "apcbatch": ["py.typed", "*.pyi"],
        "apcbatch.configs": ["*.jinja", "*.yaml"],
        "apcbatch.demo": ["*.json", "*.safetensors", "*.jinja"],
    },
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExt},
    zip_safe=False,
)
