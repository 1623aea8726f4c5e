"""What products of 8-bit integers would gain on a CPU: against those of the package, on the same numbers in turns.

    python benchmarks/int8_products.py --threads 2 --out benchmarks/results/int8_products.json

Builds int8_products.cpp beside this file with the C++ compiler (GCC 11 or newer, a processor with AVX512-VNNI). Each
size has as many copies of its weights as fill --megabytes of float32, so that weights come from memory as in a model.
The integers of both ways are compared with numpy's before anything is timed, and what both ways give with each other.
The last line is the document: machine, and one entry for each size and number of rows, milliseconds of one product.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apcbatch.bench.machine import describe
from apcbatch.kernels.cpu.linear import linear, pack_linear

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-mprefer-vector-width=512"]
SETS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mamx-tile", "-mamx-int8"]
SIZES = {"mamba-130m in": (3072, 768), "mamba-130m out": (768, 1536), "mamba-2.8b in": (10240, 2560)}
ROWS = (1, 8, 32, 2048)


def build(folder: Path) -> ctypes.CDLL:
    """The compiled products; SystemExit where the processor cannot run them."""
    library = folder / "int8_products.so"
    subprocess.run(["g++", *FLAGS, *SETS, str(SOURCE), "-o", str(library)], check=True)
    products = ctypes.CDLL(str(library))
    products.int8_packed_bytes.restype = ctypes.c_int64
    products.int8_packed_bytes.argtypes = [ctypes.c_int64] * 2
    products.int8_pack.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    products.int8_linear.argtypes = [
        *[ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64],
        *[ctypes.c_void_p] * 6,
        ctypes.c_int,
    ]
    if not products.int8_level():
        raise SystemExit("the processor has no AVX512-VNNI; run this where it has")
    return products


class Int8:
    """Weights (out, in) float32 as 8-bit integers, with a scale for each output."""

    def __init__(self, products: ctypes.CDLL, weight: torch.Tensor, most_rows: int, threads: int) -> None:
        self._products, self._threads = products, threads
        self._out, self._in = weight.shape
        padded_rows, padded_in = -(-most_rows // 32) * 32, -(-self._in // 64) * 64
        outs = -(-self._out // 16) * 16
        self.scales = np.zeros(outs, np.float32)
        self.scales[: self._out] = weight.abs().amax(1).numpy() / 127
        self.integers = np.rint(weight.numpy() / self.scales[: self._out, None]).astype(np.int8)
        self._packed = np.empty(products.int8_packed_bytes(self._out, self._in), np.int8)
        self._offset = np.empty(outs, np.int32)
        products.int8_pack(
            self.integers.ctypes.data, self._out, self._in, self._packed.ctypes.data, self._offset.ctypes.data
        )
        self.q = np.zeros((padded_rows, padded_in), np.int8)
        self.row_scales = np.zeros(padded_rows, np.float32)

    def __call__(self, x: torch.Tensor, matrices: bool) -> torch.Tensor:
        """x (t, in) float32 contiguous -> (t, out) float32."""
        y = torch.empty(x.shape[0], self._out)
        self._products.int8_linear(
            *[int(matrices), x.data_ptr(), x.shape[0], self._out, self._in],
            *[part.ctypes.data for part in (self._packed, self._offset, self.scales, self.q, self.row_scales)],
            *[y.data_ptr(), self._threads],
        )
        return y


def check(products: ctypes.CDLL, ways: list[bool]) -> None:
    """Odd sizes against numpy's integers, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    for rows, out, inputs in ((1, 16, 64), (7, 33, 130), (33, 129, 768), (50, 100, 1000)):
        packed = Int8(products, torch.randn(out, inputs, generator=generator), rows, 2)
        x = torch.randn(rows, inputs, generator=generator)
        for way in ways:
            y = packed(x, way).numpy()
            q = (packed.q[:rows, :inputs] if way else packed.q[:rows, :inputs] ^ np.int8(-128)).astype(np.int64)
            assert (np.abs(q).max(1) == 127).all()
            sums = q @ packed.integers.astype(np.int64).T
            scales = packed.scales[:out] * packed.row_scales[:rows, None]
            assert np.array_equal(y, sums.astype(np.float32) * scales), (rows, out, inputs, way)


def milliseconds(runs: dict[str, Callable[[int], object]], copies: int, repeats: int) -> dict[str, float]:
    """Of one product each: medians of alternating rounds over all copies of the weights."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            for copy in range(copies):
                run(copy)
            times[name].append(1e3 * (time.perf_counter() - begin) / copies)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def figures(products: ctypes.CDLL, ways: list[bool], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All sizes by all numbers of rows."""
    found = []
    for name, (out, inputs) in SIZES.items():
        copies = max(1, -(-options.megabytes * 1_000_000 // (4 * out * inputs)))
        weights = [torch.randn(out, inputs) / inputs**0.5 for _ in range(copies)]
        float32 = [pack_linear(weight) for weight in weights]
        bfloat16 = [pack_linear(weight.bfloat16()) for weight in weights]
        integers = [Int8(products, weight, max(options.rows), options.threads) for weight in weights]
        for rows in options.rows:
            x = torch.randn(rows, inputs)
            short = x.bfloat16()
            runs: dict[str, Callable[[int], object]] = {
                "float32": lambda copy, x=x, packed=float32: linear(x, packed[copy]),
                "bfloat16": lambda copy, x=short, packed=bfloat16: linear(x, packed[copy], torch.float32),
            }
            for way in ways:
                label = "int8, AMX" if way else "int8, VNNI"
                runs[label] = lambda copy, x=x, way=way, packed=integers: packed[copy](x, way)
            times = milliseconds(runs, copies, options.repeats)
            found.append({"product": name, "out": out, "in": inputs, "rows": rows, "ms": times})
            print(f"{name}, {rows} rows: {json.dumps(times)}", flush=True)
    return found


def main() -> None:
    """Measure and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=400, help="of float32 weights; default: %(default)s")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        products = build(Path(folder))
    ways = [False, True][: products.int8_level()]
    check(products, ways)
    machine = {**describe(), "threads": options.threads}
    document = {"machine": machine, "repeats": options.repeats, "figures": figures(products, ways, options)}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
