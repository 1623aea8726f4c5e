"""Builds the private extensions: apcbatch._C always, apcbatch._CUDA where CUDA's compiler is.

The kernels are plain C++ over pointers and strides, and the bindings take addresses, so nothing here needs
torch: one build serves every torch. csrc/build_flags.py has the flags of each source. Where the compiler has no OpenMP,
the kernels use one thread.

APCBATCH_CUDA=0 leaves the CUDA kernels out, =1 insists on them; otherwise they are built if nvcc is found (in
CUDA_HOME, on the PATH, or in /usr/local/cuda). APCBATCH_CUDA_ARCHS names other targets than the usual ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).parent
CSRC = Path("csrc")
sys.path.insert(0, str(ROOT))  # a build from an archive does not have it

from csrc.build_flags import ARITHMETIC, OPENMP, WARNINGS, WITHOUT_OPENMP, isa_flags  # noqa: E402

# -fmad=false: like -ffp-contract=off above.
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
CUDA_ARCHS = "80 90"  # machine code for these, and portable code of the last


def find_nvcc() -> str | None:
    """The path of CUDA's compiler, if it is here and wanted; says which, or why not."""
    wanted = os.environ.get("APCBATCH_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"APCBATCH_CUDA must be 0 or 1, or not be set; it is {wanted!r}")
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join([f"{homes[0]}/bin", os.environ["PATH"], f"{homes[1]}/bin"]))
    if wanted == "0":
        print("apcbatch: CPU kernels only, as APCBATCH_CUDA=0 says")
        return None
    if nvcc is None and wanted == "1":
        raise SystemExit(
            "APCBATCH_CUDA=1 asks for the CUDA kernels, but nvcc is neither in CUDA_HOME, nor on the PATH, nor in "
            "/usr/local/cuda: install the CUDA toolkit, or unset APCBATCH_CUDA"
        )
    print(f"apcbatch: CPU kernels, and CUDA kernels with {nvcc}" if nvcc else "apcbatch: CPU kernels only, no nvcc")
    return nvcc


def build_cuda(nvcc: str, folder: Path, module: Path) -> None:
    """Compile every source of csrc/cuda with nvcc, side by side, and link the module with CUDA's runtime inside."""
    archs = os.environ.get("APCBATCH_CUDA_ARCHS", CUDA_ARCHS).split()
    exact = ["90a" if arch == "90" else arch for arch in archs]  # with the instructions that only Hopper has
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in exact]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    includes = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    folder.mkdir(parents=True, exist_ok=True)
    module.parent.mkdir(parents=True, exist_ok=True)

    def run(command: list[str]) -> None:
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True)

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        run([nvcc, *NVCC_FLAGS, *targets, *includes, "-c", str(source), "-o", target])
        return target

    sources = [path for path in sorted((ROOT / CSRC / "cuda").iterdir()) if path.suffix in (".cu", ".cpp")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    run([nvcc, "-shared", *objects, "-o", str(module), "-ldl"])


def has_openmp(compiler) -> bool:
    """Whether a program for OpenMP compiles and links."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("int main() { return 0; }\n")
        try:
            objects = compiler.compile([str(source)], output_dir=folder, extra_postargs=[OPENMP])
            compiler.link_executable(objects, "probe", folder, extra_postargs=[OPENMP], target_lang="c++")
        except (CompileError, LinkError):
            return False
    return True


class BuildExt(build_ext):
    """build_ext with the flags of each source, and the CUDA module made by nvcc."""

    def build_extension(self, ext) -> None:
        if ext is cuda:
            build_cuda(nvcc, ROOT / self.build_temp / "cuda", Path(self.get_ext_fullpath(ext.name)))
        else:
            super().build_extension(ext)

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile
        if has_openmp(self.compiler):
            extension.extra_compile_args.append(OPENMP)
            extension.extra_link_args.append(OPENMP)
        else:
            print("apcbatch: kernels of one thread, as the compiler has no OpenMP")
            extension.extra_compile_args.append(WITHOUT_OPENMP)

        def compile_with_isa(obj, src, ext, cc_args, extra_postargs, pp_opts):
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *isa_flags(src, platform.machine())], pp_opts)

        self.compiler._compile = compile_with_isa
        super().build_extensions()


extension = Pybind11Extension(
    "apcbatch._C",
    sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).glob("*.cpp")),
    depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).glob("*.h")),
    include_dirs=[str(CSRC)],
    extra_compile_args=["-O3", *ARITHMETIC, *WARNINGS],
    extra_link_args=["-ldl"],
    cxx_std=17,
)

ParallelCompile(default=0).install()  # a source on each processor
nvcc = find_nvcc()
cuda = Extension("apcbatch._CUDA", sources=[]) if nvcc else None

setup(
    ext_modules=[extension, *([cuda] if cuda else [])],
    cmdclass={"build_ext": BuildExt},
)
