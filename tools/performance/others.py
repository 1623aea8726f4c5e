"""The sections that compare: the documents of benchmarks/peers.py and benchmarks/end_to_end.py."""

from __future__ import annotations

from typing import Any

from performance.tables import number, percent, table

Document = dict[str, Any]
OURS = "apcbatch"
CONTENDERS = {
    "planned": "apcbatch, planned",
    "none": "apcbatch without a cache",
    "llama-1": "llama.cpp's server, 1 slot",
    "llama-8": "llama.cpp's server, 8 slots",
}


def peers(document: Document, what: str) -> list[str]:
    """Rates of each engine and our ratio over each. what: the heading."""
    rows = []
    for comparison in document["comparisons"]:
        for figure in comparison["figures"]:
            for engine, rate in figure["tokens_per_s"].items():
                if engine != OURS:
                    rows.append(
                        (
                            f"{comparison['model']} {comparison['dtype']}, {figure['name']}",
                            engine,
                            number(figure["tokens_per_s"][OURS]),
                            number(rate),
                            f"{number(figure['ratio'][engine])} x",
                        )
                    )
    return [
        f"## {what}, tokens/s",
        "Every engine ran the same checkpoint with the same number of threads, in turns. The ratio is the median of "
        f"the rounds' ratios. Machine: {document['machine']['processor']}, {document['machine']['threads']} threads, "
        f"kernels for {document['machine']['isa']}; measured at another time than the other tables.",
        table(["", "engine", OURS, "its own", "ratio"], rows),
        *_agreement(document),
        *_left_out(document),
    ]


def _agreement(document: Document) -> list[str]:
    found = [
        f"{comparison['model']} {comparison['dtype']}: {engine} {count}"
        for comparison in document["comparisons"]
        for engine, count in comparison["greedy_tokens_that_agree"].items()
    ]
    return [
        "Greedy tokens that agree with ours, up to the first difference of each prompt: "
        + "; ".join(found)
        + ". In bfloat16 engines round in different places, so only float32 shows whether a conversion is right."
    ]


def _left_out(document: Document) -> list[str]:
    lines = [
        f"{comparison['model']} {comparison['dtype']}, {figure['name']}: {engine} ({why})"
        for comparison in document["comparisons"]
        for figure in comparison["figures"]
        for engine, why in figure["left_out"].items()
    ]
    return ["Left out: " + "; ".join(lines) + "."] if lines else []


def end_to_end(document: Document) -> list[str]:
    """Whole runs beside llama.cpp's server and beside ourselves without a cache."""
    rows = [
        (
            CONTENDERS[run["contender"]],
            *(f"{run[name]:,}" for name in ("conversations", "requests", "prompt_tokens", "computed_tokens")),
            number(run["seconds"]),
            number(run["prompt_tokens_per_s"]),
            f"{number(run['times_planned'])} x",
            percent(run.get("in_steps")),
        )
        for run in document["runs"]
    ]
    heads = ["", "conversations", "requests", "prompt tokens", "computed", "seconds", "prompt tokens/s"]
    return [
        f"## {document['input']} from end to end, {document['model']} {document['dtype']}",
        f"Every contender gets the same prompts in the same order and generates {document['max_tokens']} new tokens "
        "for each. Seconds do not include loading the model. The ratio is over the planned run of the same "
        "conversations, whose number is in each row.",
        table([*heads, "time over planned", "in model steps"], rows),
    ]
