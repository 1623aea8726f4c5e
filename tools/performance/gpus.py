"""The section about a model over several GPUs, from the document of benchmarks/cuda_gpus.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from performance.tables import number, table

Document = dict[str, Any]


def sections(document: Document) -> list[str]:
    """Headings, sentences and tables in order."""
    return [
        f"## Over {document['gpus']} GPUs",
        "[`--gpus`](../operating.md#several-gpus) gives each GPU some of the layers. To repeat it, on a machine with "
        "as many GPUs:",
        f"```\npython benchmarks/cuda_gpus.py shapes/{document['model'] or 'mamba-2.8b'} --input chats.jsonl --whole "
        "--out benchmarks/results/cuda_gpus.json\npython tools/make_performance_docs.py\n```",
        *_workloads(document),
        *_whole(document),
    ]


def _workloads(document: Document) -> Iterator[str]:
    workloads, gpus = document["workloads"], document["gpus"]
    if not workloads:
        return
    yield (
        f"{document['device']}, {document['model']}, bfloat16, exact, the requests of a file planned, seconds without "
        f"loading, medians of {document['repeats']} in turns; `--max-running {document['max_running']} "
        f"--max-batch-tokens {document['max_batch_tokens']}`. With {gpus} GPUs {gpus * document['max_running']} "
        "requests run side by side; the second column is one GPU with as many."
    )
    heads = [
        "", "requests", "computed tokens", "1 GPU", f"1 GPU, {gpus * document['max_running']} at once", f"{gpus} GPUs",
        "times as fast", "than the second",
    ]  # fmt: skip
    rows = []
    for one in workloads:
        seconds = [one["seconds"][kind] for kind in ("one", "one, as many at once", "several")]
        faster = [f"{alone / seconds[2]:.2f}" for alone in seconds[:2]]
        rows.append(
            [one["name"], f"{one['requests']:,}", f"{one['computed_tokens']:,}", *map(number, seconds), *faster]
        )
    yield table(heads, rows)
    if all(one["same_tokens"] for one in workloads):
        yield "All answers have the same tokens."


def _whole(document: Document) -> Iterator[str]:
    found = document["whole"]
    if not found:
        return
    yield "### Jamba-mini's full shape"
    yield "52 billion weights in bfloat16, drawn on the devices; prefills of 16 x 2048 tokens, 64 new tokens of each."
    heads = [""] + [f"{one['gpus']} GPU{'s' if one['gpus'] > 1 else ''}" for one in found]
    rows = [
        ["weights and pool, GB of each", *(number(max(one["weights_and_pool_bytes"]) / 1e9) for one in found)],
        ["at most, GB of each", *(number(max(one["peak_bytes"]) / 1e9) for one in found)],
        ["prefill, k tokens/s", *(number(one["prefill_tokens_s"] / 1e3) for one in found)],
    ]
    for running in sorted({point["running"] for one in found for point in one["decode"]}):
        rates = ({point["running"]: point["tokens_s"] for point in one["decode"]} for one in found)
        rows.append([f"decode, {running} at once, tokens/s", *(number(rate.get(running)) for rate in rates)])
    rows.append(["restored tokens", *(f"{one['restored_tokens']:,}" for one in found)])
    rows.append(["seconds cold / restored", *(f"{one['cold_s']:.2f} / {one['warm_s']:.2f}" for one in found)])
    yield table(heads, rows)
    if all(one["cached_equals_cold"] and one["same_as_first"] for one in found):
        yield "Restored answers equal cold ones, and all columns' answers each other's, bit for bit."
