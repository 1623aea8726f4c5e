"""What the kernels do where memory, threads or arguments fail: an error of that call, never an abort, a hang or a
wrong bit."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from apcbatch import _C
from apcbatch.kernels.arguments import PAGE_TOKENS
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import rotary_steps
from apcbatch.kernels.ragged import Ragged
from tests.effort import table
from tests.kernels.recurrent import Conv, Scan, ragged, same_bits

ops = CpuBackend()

Op = Callable[[], torch.Tensor]


def shared_ops() -> dict[str, Op]:
    """One call of each kernel that takes scratch inside a parallel region, with work for two threads."""
    scan, conv, batch = Scan.random(96, 128, 32, torch.float32), Conv.random(96, 2048, 4, torch.float32), [48, 48]
    weight, x, logits = torch.randn(512, 256), torch.randn(64, 256), torch.randn(64, 2048)
    packed = ops.pack_linear(weight)
    q, cache = torch.randn(128, 4, 64), torch.randn(4, PAGE_TOKENS, 2, 64)
    where = torch.arange(4).view(2, 2), torch.tensor([0, 64, 128]), torch.tensor([0, 64])
    return {
        "scan": lambda: scan.run(scan.arena(2), ragged(batch, [-1, -1], [0, 1], None)),
        "conv": lambda: conv.run(conv.arena(2), ragged(batch, [-1, -1], [0, 1], None)),
        "linear": lambda: ops.linear(x, packed),
        "attention": lambda: ops.paged_attention(q, cache, cache, *where, 0.1),
        "topk": lambda: ops.route(logits, 2)[0],
    }


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads for the kernels; afterwards no allocation is refused any more."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    _C.refuse_scratch(0)


@table("name", ["scan", "conv", "linear", "attention", "topk"])
def test_memory_runs_out_inside_a_parallel_region(two_threads, name):
    """The fault: std::bad_alloc left an OpenMP region, which aborts the process."""
    op = shared_ops()[name]
    expected = op()
    _C.refuse_scratch(2)
    with pytest.raises(MemoryError):
        op()
    assert same_bits(op(), expected), "the next call is as good as ever"
    _C.refuse_scratch(1)
    assert same_bits(op(), expected), "a thread without memory leaves its work to the other"


def test_memory_runs_out_in_one_thread():
    """The same outside a region, where one thread does all of the work."""
    logits = torch.randn(3, 40)
    _C.refuse_scratch(1)
    with pytest.raises(MemoryError):
        ops.route(logits, 2)


FORK = """
import concurrent.futures, faulthandler, multiprocessing, os, signal, threading, torch
from tests.kernels.test_failures import shared_ops
faulthandler.enable()
faulthandler.register(signal.SIGALRM, chain=True)
def end_a_hang(): signal.alarm(60)  # the process prints where it waits, and ends; an alarm is not inherited
end_a_hang()
torch.set_num_threads(2)
calls = shared_ops()
expected = {}
def compute(name): return name, calls[name]().numpy().tobytes()
thread = threading.Thread(target=lambda: expected.update(map(compute, calls)))
thread.start(); thread.join()
fork = multiprocessing.get_context("fork")
with concurrent.futures.ProcessPoolExecutor(2, fork, end_a_hang) as pool:  # unlike Pool, raises if a worker dies
    assert dict(pool.map(compute, calls)) == expected, "workers of a pool"
square = torch.ones(512, 512)
square @ square  # torch's own threads
assert dict(map(compute, calls)) == expected
for generation in range(2):  # a child, and a child of the child
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        break
    end_a_hang()
else:
    status = 0
same = dict(map(compute, calls)) == expected
square @ square
os._exit(0 if same and status == 0 else 1)
"""


@pytest.mark.slow
def test_a_forked_process_computes():
    """The fault: after any kernel in the parent, in whichever thread, one in a forked child or in a worker of a pool
    waited for threads that do not exist."""
    ended = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)


def misaligned(*shape: int) -> torch.Tensor:
    """A tensor of float32 whose values begin one byte after a multiple of four."""
    count = torch.Size(shape).numel()
    buffer = (ctypes.c_char * (4 * count + 64))()
    offset = 1 - ctypes.addressof(buffer) % 4
    tensor = torch.frombuffer(buffer, dtype=torch.float32, count=count, offset=offset % 64)
    return tensor.view(shape)


def without_memory(*shape: int) -> torch.Tensor:
    """A tensor whose storage was taken away."""
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


@table("make, sentence", [(misaligned, "must lie at a multiple"), (without_memory, "has no memory")])
def test_bad_addresses_are_refused(make, sentence):
    """A float that is read where none can lie, or at address zero."""
    good, bad = torch.ones(4, 8), make(4, 8)
    packed = ops.pack_linear(good)
    for call in (
        lambda: ops.rms_norm(bad, None, 1e-5, torch.float32),
        lambda: ops.silu_mul(good, bad),
        lambda: ops.linear(bad, packed),
        lambda: ops.pack_linear(bad),
        lambda: ops.route(bad, 1),
        lambda: ops.greedy(bad),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_no_rows():
    """No rows and no sequences are answered with none, and nothing is divided by their number; 2^40 rows of nothing are
    not walked one by one."""
    none = torch.empty(0, 8)
    batch = Ragged.create(torch.tensor([0]))
    packed = ops.pack_linear(torch.ones(4, 8))
    cache = torch.zeros(0, PAGE_TOKENS, 2, 8)
    no_pages = torch.empty(0, 0, dtype=torch.int64), torch.tensor([0]), torch.empty(0, dtype=torch.int64)
    states = torch.empty(0, 2, 8)
    assert ops.linear(none, packed).shape == (0, 4)
    assert packed.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 8)
    assert ops.rms_norm(none, torch.ones(8), 1e-5, torch.float32).shape == (0, 8)
    assert ops.silu_mul(none, none).shape == (0, 8)
    assert ops.route(none, 2)[1].shape == (0, 2)
    assert ops.greedy(none)[0].shape == (0,)
    assert ops.causal_conv(none, torch.ones(8, 3), None, states, batch).shape == (0, 8)
    a, bc = -torch.ones(2, 8), torch.empty(0, 2)
    assert ops.selective_scan(none, none, a, bc, bc, None, None, None, states, batch).shape == (0, 8)
    assert ops.paged_attention(torch.empty(0, 4, 8), cache, cache, *no_pages, 1.0).shape == (0, 4, 8)
    ops.write_kv(cache[:, 0], cache[:, 0], cache, cache, torch.empty(0, dtype=torch.int64))
    nothing, steps = torch.empty(2**40, 0), rotary_steps(4, 1e4)
    assert ops.rms_norm(nothing, None, 1e-5, torch.float32).shape == (2**40, 0)
    assert ops.silu_mul(nothing, nothing).shape == (2**40, 0)
    heads = torch.empty(0, 2, 8)
    assert ops.norm_rope(heads, torch.ones(8), 1e-6, steps, torch.empty(0, dtype=torch.int64)).shape == (0, 2, 8)
    assert ops.sigmoid_mul(none, none).shape == (0, 8)


def test_sizes_beyond_memory_are_refused():
    """Sizes whose product wraps around, positions that do when a length is added to them, and a number of heads that is
    divided by."""
    with pytest.raises(ValueError, match="fewer than 2\\^63 bytes; 1152921504606846976 rows of 4 columns"):
        ops.pack_linear(torch.ones(1, 4).expand(2**60, 4))
    for kv_heads, ends, context, sentence in (
        (1, [0, 1], [2**63 - 1], "a column for each page"), (1, [0, 1], [2**62], "a column for each page"),
        (1, [0, 2**63 - 1, 1], [0, 0], "must ascend from 0"), (0, [0, 1], [0], "at least one kv head"),
    ):  # fmt: skip
        cache, pages = torch.zeros(1, PAGE_TOKENS, kv_heads, 8), torch.zeros(len(context), 1, dtype=torch.int64)
        where = pages, torch.tensor(ends), torch.tensor(context)
        with pytest.raises(ValueError, match=sentence):
            ops.paged_attention(torch.ones(1, 1, 8), cache, cache, *where, 1.0)


def test_results_that_overlap_are_refused():
    """Rows or slots that several threads would write at once."""
    with pytest.raises(ValueError, match="must not overlap"):
        ops.add_rms_norm_(torch.ones(1, 8).expand(4, 8), torch.ones(4, 8), None, 1e-5, torch.float32)
    scan = Scan.random(4, 8, 2, torch.float32)
    with pytest.raises(ValueError, match="must not overlap"):
        scan.run(torch.zeros(1, 2, 8).expand(3, 2, 8), ragged([2, 2], [-1, -1], [0, 1], None))
