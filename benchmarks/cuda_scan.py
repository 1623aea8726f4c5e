"""The CUDA scan against the reference kernel and against its floors.

    pip download --no-deps --no-binary :all: mamba-ssm && tar xf mamba_ssm-*.tar.gz   # outside this repository
    python benchmarks/cuda_scan.py --reference mamba_ssm-*/csrc/selective_scan

Times are medians of CUDA events over launches that go round several sets of inputs, each set larger than what the
cache keeps of the others; outputs begin as NaN and are compared with the reference kernel's. The floors are a
device-to-device copy of the bytes that a scan must move, and one exp2 a state and token at the rate that a kernel of
nothing else reaches. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from apcbatch.kernels.cuda.ops import CudaOps
from apcbatch.kernels.ragged import Ragged

Shape = tuple[int, int, int, int]  # sequences, d_inner, tokens, d_state
BARS: list[Shape] = [
    (1, 1536, 2048, 16),
    (8, 1536, 2048, 16),
    (32, 1536, 2048, 16),
    (8, 5120, 2048, 16),
    (4, 8192, 2048, 16),
    (1, 8192, 16384, 16),
    (8, 8192, 2048, 16),
]
SERIES: list[Shape] = [
    *((b, 1536, 2048, 16) for b in (2, 4, 16, 64)),
    *((8, d, 2048, 16) for d in (1024, 4096)),
    *((8, 4096, t, 16) for t in (128, 512, 8192)),
    *((8, 4096, 2048, n) for n in (8, 32, 64, 128)),
]
SNAPSHOT_EVERY = 256  # tokens
EXP2 = r"""
__global__ void rate(float* out, int rounds) {
    float x[8];
    for (int i = 0; i < 8; ++i) x[i] = 1e-3f * (threadIdx.x + i);
    for (int r = 0; r < rounds; ++r)
        for (int i = 0; i < 8; ++i) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += x[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
void exp2_rate(torch::Tensor out, int64_t rounds) {
    rate<<<out.numel() / 256, 256>>>(out.data_ptr<float>(), int(rounds));
}
"""


@dataclass
class Inputs:
    """One set of arguments of the scan, as a model has them: column slices of two projections."""

    xz: torch.Tensor
    dt: torch.Tensor
    bc: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor
    bias: torch.Tensor
    state: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, slots: int) -> Inputs:
        b, d, t, n = shape
        return cls(
            torch.randn(b * t, 2 * d).bfloat16(),
            (torch.randn(b * t, d) - 3).bfloat16(),
            torch.randn(b * t, 2 * n).bfloat16(),
            -n * torch.rand(n, d) - 0.1,
            torch.randn(d),
            torch.randn(d),
            torch.full((slots, n, d), float("nan")),
        )

    def scan(self, batch: Ragged, lanes: int = 0) -> torch.Tensor:
        d, n = self.dt.shape[1], self.A.shape[0]
        ops = CudaOps()
        ops.lanes = lanes
        return ops.selective_scan(
            self.xz[:, :d],
            self.dt,
            self.A,
            self.bc[:, :n],
            self.bc[:, n:],
            self.D,
            self.xz[:, d:],
            self.bias,
            self.state,
            batch,
        )

    def channel_major(self, shape: Shape) -> tuple[Any, ...]:
        """The same, as the reference kernel takes it: (b, channel, token)."""
        b, d, t, n = shape

        def turned(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(0, (b, t)).transpose(1, 2).contiguous()

        return (
            turned(self.xz[:, :d]),
            turned(self.dt),
            self.A.t().contiguous(),
            turned(self.bc[:, :n]).unsqueeze(1),
            turned(self.bc[:, n:]).unsqueeze(1),
            self.D,
            turned(self.xz[:, d:]),
            self.bias,
            True,
        )


def batch_of(b: int, t: int, every: int = 0) -> Ragged:
    """b sequences of t tokens from zeros, final states kept, and a snapshot every `every` tokens."""
    steps = range(every, t + 1, every) if every else range(0)
    cpu: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
    return Ragged(
        torch.arange(0, b * t + 1, t, **cpu),
        torch.full((b,), -1, **cpu),
        torch.arange(b, **cpu),
        torch.arange(b + 1, **cpu) * len(steps),
        torch.tensor([*steps] * b, **cpu),
        b + torch.arange(b * len(steps), **cpu),
    )


def median_ms(runs: list[Callable[[], object]], repeats: int = 15) -> float:
    """The median time of one run, going round all of them."""
    for run in runs:
        run()
    times = []
    for i in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(4_000_000)  # while the device waits, the launches queue up: Python's time stays out
        begin.record()
        runs[i % len(runs)]()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def load_reference(folder: Path) -> Any:
    """The reference's forward kernel for bfloat16, built from its source; what else it binds stays unresolved."""
    from torch.utils.cpp_extension import load

    copy = Path(tempfile.mkdtemp())
    for source in folder.iterdir():
        lines = source.read_text().splitlines()
        if source.name == "selective_scan_fwd_bf16.cu":
            lines = [line for line in lines if "complex_t" not in line]
        (copy / source.name).write_text("\n".join(lines))
    sys.setdlopenflags(os.RTLD_LAZY)
    names = ("selective_scan.cpp", "selective_scan_fwd_bf16.cu")
    flags = [
        "-O3",
        "--use_fast_math",
        "-std=c++17",
        "-U__CUDA_NO_HALF_OPERATORS__",
        "-U__CUDA_NO_HALF_CONVERSIONS__",
        "-U__CUDA_NO_BFLOAT16_OPERATORS__",
        "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    ]
    return load(
        "reference_scan", [str(copy / name) for name in names], extra_cuda_cflags=flags, extra_ldflags=["-Wl,-z,lazy"]
    )


def measure_rates() -> tuple[float, float]:
    """Bytes a second of a copy, read and written; exp2 a second."""
    from torch.utils.cpp_extension import load_inline

    source = torch.randn(2**29)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / median_ms([lambda: target.copy_(source)]) * 1e3
    module = load_inline(
        "exp2_rate", "void exp2_rate(torch::Tensor, int64_t);", cuda_sources=EXP2, functions=["exp2_rate"]
    )
    out, rounds = torch.empty(132 * 8 * 256 * 4), 4096
    return copied, out.numel() * 8 * rounds / median_ms([lambda: module.exp2_rate(out, rounds)]) * 1e3


def measure(shape: Shape, reference: Any, rates: tuple[float, float]) -> dict[str, Any]:
    """One row: times in ms and what they are of each other."""
    b, d, t, n = shape
    bytes_moved = b * t * (4 * d + 2 * n) * 2
    sets = [Inputs.random(shape, b) for _ in range(max(2, min(4, int(2e8 // bytes_moved) + 1)))]
    batch = batch_of(b, t)
    out = sets[0].scan(batch)
    row: dict[str, Any] = {"sequences": b, "d_inner": d, "tokens": t, "d_state": n}
    row["ms"] = median_ms([lambda one=one: one.scan(batch) for one in sets])
    row["memory_floor_ms"] = bytes_moved / rates[0] * 1e3
    row["exp2_floor_ms"] = b * t * d * n / rates[1] * 1e3
    row["floor_share"] = max(row["memory_floor_ms"], row["exp2_floor_ms"]) / row["ms"]
    if reference is not None:
        turned = [one.channel_major(shape) for one in sets[:2]]
        theirs = reference.fwd(*turned[0])[2].transpose(1, 2).flatten(0, 1).double()
        row["difference"] = float((out.double() - theirs).norm() / theirs.norm())
        row["reference_ms"] = median_ms([lambda one=one: reference.fwd(*one) for one in turned])
        row["times_faster"] = row["reference_ms"] / row["ms"]
    return row


def measure_snapshots(shape: Shape) -> float:
    """Return the time with a snapshot every SNAPSHOT_EVERY tokens over the time without, measured alternately."""
    b, d, t, _ = shape
    one = Inputs.random(shape, b + b * (t // SNAPSHOT_EVERY))
    plain, kept = batch_of(b, t), batch_of(b, t, SNAPSHOT_EVERY)
    ratios = [median_ms([lambda: one.scan(kept)], 5) / median_ms([lambda: one.scan(plain)], 5) for _ in range(5)]
    return statistics.median(ratios)


@click.command()
@click.option("--reference", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--series/--no-series", default=True, help="More shapes than those with a bar.")
def main(reference: Path | None, series: bool) -> None:
    torch.manual_seed(int(torch.seed() % 2**31))
    with torch.device("cuda"), torch.inference_mode():
        kernel = None if reference is None else load_reference(reference)
        rates = measure_rates()
        click.echo(f"{torch.cuda.get_device_name()}: copy {rates[0] / 1e12:.2f} TB/s, exp2 {rates[1] / 1e12:.2f} T/s")
        rows = []
        for shape in [*BARS, *(SERIES if series else [])]:
            row = measure(shape, kernel, rates)
            rows.append(row)
            torch.cuda.empty_cache()
            click.echo("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
        snapshots = measure_snapshots((32, 1536, 2048, 16))
    document = {
        "device": torch.cuda.get_device_name(),
        "copy_bytes_per_s": rates[0],
        "exp2_per_s": rates[1],
        "rows": rows,
        "snapshots_256": snapshots,
    }
    click.echo(json.dumps(document))


if __name__ == "__main__":
    main()
