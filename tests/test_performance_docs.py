"""docs/performance.md from the benchmarks' documents: what is in them is on the page, what was not run is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.threads import with_before

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "make_performance_docs.py"


def figure(group: str, name: str, value: float, unit: str, **details: Any) -> dict[str, Any]:
    """One figure as `apcbatch bench` gives it."""
    return {"group": group, "name": name, "value": value, "unit": unit, **details}


def engine() -> dict[str, Any]:
    """A document of benchmarks/measure.py with one figure of each group."""
    figures = [
        figure("kernels", "scan, 1 thread(s), float32", 5.25, "ns a token and channel", of_limit=0.61),
        figure("prefill", "prefill of 512", 1234.0, "tokens/s", tokens=512, seconds=0.415),
        figure("prefill", "matrix products alone over a prefill of 2048", 0.77, "x", products=97),
        figure("decode", "decode, 16 running", 321.0, "tokens/s", running=16),
        figure("parts", "parts of a prefill of 2048", 0.8, "x", seconds=2.0, parts={"scan": 0.19, "python": 0.01}),
        figure("reuse", "first token of 512, restored from RAM", 7.25, "ms", tokens=512, seconds=0.00725),
        figure(
            "run", "run, cold", 12.5, "s", requests=27, prompt_tokens=98765, cached_tokens=87654,
            computed_tokens=11111, in_steps=0.91,
        ),
    ]  # fmt: skip
    machine = {"processor": "A processor", "isa": "avx2", "threads": 2, "torch": "2", "python": "3"}
    limits = {
        "float32_flops_per_s": 2e11,
        "product_flops_per_s": 2e11,
        "read_bytes_per_s": 2e10,
        "copy_bytes_per_s": 1e10,
    }
    one = {"version": "1", "model": "mamba-130m", "dtype": "float32", "machine": machine, "limits": limits}
    return {"seconds": 60.0, "measured": [{**one, "figures": figures}]}


def made(folder: Path, **documents: dict[str, Any]) -> str:
    """The page from these documents."""
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    command = [sys.executable, str(SCRIPT), "--results", str(folder), "--docs", str(folder / "docs")]
    subprocess.run(command, check=True, cwd=folder)
    return (folder / "docs" / "performance.md").read_text()


def test_page_of_the_engine_alone(tmp_path: Path) -> None:
    """Faults: a group of figures that does not reach the page; a heading for engines that were not measured."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    page = made(tmp_path, engine=engine())
    for text in ("1,234", "| 321 |", "61 %", "77 %", "19 %", "7.25", "98,765", "91 %", "A processor"):
        assert text in page
    assert "other engines" not in page and "end to end" not in page
    assert (tmp_path / "docs" / "images" / "performance.svg").read_text().startswith("<?xml")


def test_page_with_threads(tmp_path: Path) -> None:
    """Faults: a gain the wrong way up; a share of another pass, or of what other threads read."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    one = {"model": "mamba-130m", "dtype": "float32", "threads": 1, "pass": "prefill of 2048", "parts": {"scan": 0.09}}
    rates = [
        {**one, "tokens_per_s": 500.0},
        {**one, "threads": 16, "tokens_per_s": 6000.0, "parts": {"scan": 0.13}},
        {**one, "dtype": "bfloat16", "threads": 16, "tokens_per_s": 21000.0, "parts": {"scan": 0.31}},
    ]
    machine = {"processor": "Sixteen cores", "isa": "amx", "torch": "2", "python": "3"}
    page = made(tmp_path, engine=engine(), threads={"machine": machine, "rates": rates})
    assert "GB/s at which" not in page
    rates[1]["bytes_per_s"] = 26e9
    reads = {"1": 10e9, "16": 200e9}
    page = made(tmp_path, engine=engine(), threads={"machine": machine, "rates": rates, "read_bytes_per_s": reads})
    assert "| mamba-130m float32, prefill of 2048 | 13 % | 26.0 | 13 % |" in page and "the 200 GB/s at which" in page
    assert "| mamba-130m bfloat16, prefill of 2048 | 31 % |  |  |" in page
    assert "| mamba-130m float32, prefill of 2048 | 500 | 6,000 | 12.0 |  |" in page
    assert "| mamba-130m bfloat16, prefill of 2048 |  | 21,000 |  | 3.50 |" in page
    assert "| 13 % |" in page and "| 31 % |" in page and "9 %" not in page.partition("Sixteen")[2].partition("##")[0]
    assert "Sixteen cores, kernels for amx" in page and "before" not in page.partition("Sixteen")[2].partition("##")[0]


def test_page_with_threads_before_a_change(tmp_path: Path) -> None:
    """Faults: a gain over another pass or the wrong way up; a column of a comparison that one number cannot have."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    keys = {"model": "mamba-130m", "dtype": "float32", "threads": 16, "parts": {"scan": 0.13}}
    after = {"machine": {"processor": "Sixteen cores", "isa": "amx", "torch": "2", "python": "3"}, "rates": [
        {**keys, "pass": "decode, 1 running", "tokens_per_s": 180.0},
        {**keys, "pass": "decode, 32 running", "tokens_per_s": 2400.0},
    ]}  # fmt: skip
    before = {"rates": [{**after["rates"][1], "tokens_per_s": 1500.0}]}
    document = with_before(after, before, "passes of one call")
    page = made(tmp_path, engine=engine(), threads=document)
    assert "those of 16 threads before passes of one call, and the gain" in page
    assert "| mamba-130m float32, decode, 32 running | 2,400 | 1,500 | 1.60 |  |" in page
    assert "| mamba-130m float32, decode, 1 running | 180 |  |  |  |" in page
    assert "16 over 16" not in page


def test_page_with_peers(tmp_path: Path) -> None:
    """Faults: a ratio the wrong way up; a contender over fewer conversations that does not say so."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    compared = {
        "name": "prefill of 512", "tokens": 512, "repeats": 5, "left_out": {"transformers": "about 99 s a repeat"},
        "tokens_per_s": {"apcbatch": 900.0, "llama.cpp f32": 250.0}, "ratio": {"llama.cpp f32": 3.6},
    }  # fmt: skip
    comparison = {
        "model": "mamba-130m",
        "dtype": "float32",
        "greedy_tokens_that_agree": {"llama.cpp f32": "48 of 48"},
        "figures": [compared],
    }
    run = {
        "contender": "llama-1", "conversations": 4, "requests": 50, "prompt_tokens": 300000, "computed_tokens": 40000,
        "seconds": 200.0, "prompt_tokens_per_s": 1500.0, "times_planned": 7.5,
    }  # fmt: skip
    end_to_end = {
        "input": "chats.jsonl",
        "model": "mamba-130m",
        "dtype": "bfloat16",
        "max_tokens": 16,
        "runs": [run],
    }
    page = made(tmp_path, engine=engine(), peers={"comparisons": [comparison]}, end_to_end=end_to_end)
    assert "| mamba-130m float32, prefill of 512 | llama.cpp f32 | 900 | 250 | 3.60 x |" in page
    assert "48 of 48" in page and "transformers (about 99 s a repeat)" in page
    assert "| llama.cpp's server, 1 slot | 4 | 50 | 300,000 | 40,000 | 200 | 1,500 | 7.50 x |  |" in page


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    """Fault: a figure that is missing without a word."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    document = engine()
    document["measured"][0]["left_out"] = {"the norm": "the machine was busy"}
    assert "Left out: mamba-130m float32: the norm (the machine was busy)." in made(tmp_path, engine=document)


def test_the_page_is_what_the_results_say(tmp_path: Path) -> None:
    """Fault: a figure is edited on the page, or new results do not reach it (run tools/make_performance_docs.py)."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    command = [sys.executable, str(SCRIPT), "--docs", str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path)
    for page in ("performance.md", "performance-cuda-models.md", "performance-int8.md"):
        assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()


def test_page_of_models_on_cuda(tmp_path: Path) -> None:
    """Faults: a figure, a bar or another engine's that does not reach the page; a ratio upside down; a run left out."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    figures = [
        {"name": "loading", "unit": "s", "exact": 1.25, "fast": 1.0},
        {"name": "prefill 1 x 2048", "unit": "tokens/s", "exact": 50e3, "fast": 60e3, "products": 100e3},
        {"name": "decode 1", "unit": "s", "exact": 4e-3, "fast": 3.2e-3, "bytes": 3_000_000_000},
        {"name": "snapshots every 64 over none", "unit": "times", "exact": 1.0625},
        {
            "name": "snapshots",
            "unit": "costs",
            "bytes": 23_000_000,
            "keep_s": 1e-4,
            "restore_memory_s": 2e-4,
            "restore_disk_s": 1.5e-3,
            "write_s": 3e-3,
            "break_even_tokens": 75.0,
        },
    ]
    seconds = {"total": 9.0, "load": 2.0, "prefill": 4.0, "decode": 1.5, "store": 0.25}
    run = {
        "rounds_s": [7.5, 7.0, 6.5],
        "command_s": 12.0,
        "cached_by_source": {"memory": 3_000_000, "disk": 2_245_000},
        "requests": 611,
        "prompt_tokens": 4_490_000,
        "computed_tokens": 155_572,
        "hit_rate": 0.96,
        "seconds": seconds,
    }
    models = {
        "device": "A card", "torch": "2", "version": "1", "bandwidth_bytes_s": 3e12, "repeats": 5, "seconds": 60.0,
        "bus_bytes_s": [55e9, 54e9],
        "models": [{"model": "some", "dtype": "bfloat16", "note": "Drawn.", "figures": figures}],
        "runs": [{"name": "planned", **run}],
    }  # fmt: skip
    other = {
        "engine": "Another", "how": "somehow", "run": 25.5,
        "models": {"some": {"decode 1": 5e-3}},
    }  # fmt: skip
    made(
        tmp_path, engine=engine(), cuda_models=models, cuda_vllm=other, cuda_bars={"some": {"loading": 2.5}, "run": 5.0}
    )
    page = (tmp_path / "docs" / "performance-cuda-models.md").read_text()
    for row in (
        "| loading, s | 1.25 | 1.00 | 1.25 |  |  | 2.50 |",
        "| prefill 1 x 2048, k tokens/s | 50.0 | 60.0 | 1.20 | 50 % |  |  |",
        "| decode 1, ms a step | 4.00 | 3.20 | 1.25 | 25 % | 5.00 |  |",
        "| planned | 7.00 | 4.00 | 1.50 | 0.25 | 2.00 | 12.0 | 155,572 | 96 % | 50 % |",
    ):
        assert row in page
    assert "1.062 times as long" in page and "\n\nDrawn.\n\n" in page and "25.5 s" in page and "A card" in page
    assert "55.0 GB/s to the device and 54.0 GB/s from it" in page
    costs = "0.10 ms to keep, 0.20 ms to restore from memory and 1.50 ms from disk (the page cache), in which time 75"
    assert costs in page and "3.00 ms of its writing" in page
    assert "3 rounds" in page and "5.0 s" in page


def test_page_of_integers(tmp_path: Path) -> None:
    """Faults: a machine, a kind of product or a model that is left out; a gain over the slower of the integers."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    ms = {"float32": 8.0, "bfloat16": 4.0, "int8, VNNI": 2.5, "int8, AMX": 1.25}
    figure = {"product": "some", "out": 3072, "in": 768, "rows": 32, "ms": ms}
    machine = {"processor": "A processor", "isa": "amx", "threads": 16}
    products = {"machine": machine, "repeats": 5, "figures": [figure]}
    short = {**figure, "ms": {name: ms[name] for name in ("float32", "bfloat16", "int8, VNNI")}}
    other = {**products, "machine": {**machine, "processor": "Another", "threads": 2}, "figures": [short]}
    variants = {"int8 weights": {"mean_logprob": -0.83564, "same_likeliest": 0.9946}}
    quality = {"models": [{"model": "demo", "tokens": 4092, "variants": variants}]}
    made(tmp_path, engine=engine(), int8_products=other, int8_products_amx=products, int8_quality=quality)
    page = (tmp_path / "docs" / "performance-int8.md").read_text()
    for text in (
        "| some, 768 to 3072, 32 rows | 8.00 | 4.00 | 2.50 | 1.25 | 3.20 |",
        "| some, 768 to 3072, 32 rows | 8.00 | 4.00 | 2.50 | 1.60 |",
        "| demo, int8 weights | -0.8356 | 99.5 % |",
        "A processor, 16 threads", "Another, 2 threads", "4,092 tokens",
    ):  # fmt: skip
        assert text in page


def test_several_gpus(tmp_path: Path) -> None:
    """Catches a ratio the wrong way round, one GPU's figures in another's column, and a claim of the same answers where
    they were not."""
    seconds = {"one": 6.0, "one, as many at once": 4.5, "several": 3.0}
    workload = {
        "name": "chats, 16 new tokens", "requests": 611, "computed_tokens": 156_000, "seconds": seconds,
        "same_tokens": True,
    }  # fmt: skip
    whole = {
        "gpus": 2, "weights_and_pool_bytes": [58e9, 59e9], "peak_bytes": [60e9, 61e9], "prefill_tokens_s": 40e3,
        "decode": [{"running": 64, "tokens_s": 1800.0}], "restored_tokens": 8832, "cold_s": 0.5, "warm_s": 0.25,
        "cached_equals_cold": True, "same_as_first": True,
    }  # fmt: skip
    alone = {**whole, "gpus": 1, "decode": [{"running": 32, "tokens_s": 950.0}, {"running": 64, "tokens_s": 1600.0}]}
    models = {
        "device": "A card", "torch": "2", "version": "1", "bandwidth_bytes_s": 3e12, "repeats": 5, "seconds": 60.0,
        "models": [], "runs": [],
    }  # fmt: skip
    document = {
        "device": "A card", "gpus": 2, "model": "some", "repeats": 3, "max_running": 128, "max_batch_tokens": 8192,
        "workloads": [workload], "whole": [whole, alone],
    }  # fmt: skip
    other = {"engine": "Another", "how": "somehow", "run": 25.5, "models": {}}
    made(tmp_path, engine=engine(), cuda_models=models, cuda_vllm=other, cuda_bars={}, cuda_gpus=document)
    page = (tmp_path / "docs" / "performance-cuda-models.md").read_text()
    for row in (
        "| chats, 16 new tokens | 611 | 156,000 | 6.00 | 4.50 | 3.00 | 2.00 | 1.50 |",
        "| weights and pool, GB of each | 59.0 | 59.0 |",
        "| decode, 32 at once, tokens/s |  | 950 |",
        "| decode, 64 at once, tokens/s | 1,800 | 1,600 |",
        "| seconds cold / restored | 0.50 / 0.25 | 0.50 / 0.25 |",
        "All answers have the same tokens.",
        "all columns' answers each other's, bit for bit",
    ):
        assert row in page
    document["workloads"][0]["same_tokens"] = document["whole"][1]["same_as_first"] = False
    made(tmp_path, engine=engine(), cuda_models=models, cuda_vllm=other, cuda_bars={}, cuda_gpus=document)
    page = (tmp_path / "docs" / "performance-cuda-models.md").read_text()
    assert "same tokens." not in page and "bit for bit." not in page.split("## Over 2 GPUs")[1]


def test_nothing_measured(tmp_path: Path) -> None:
    """Fault: an empty page in place of the one that is there."""
    command = [sys.executable, str(SCRIPT), "--results", str(tmp_path), "--docs", str(tmp_path / "docs")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "benchmarks/measure.py" in done.stderr
    assert not (tmp_path / "docs").exists()
