"""Every option of `run`: type, range, default, help, flag and environment variable.

resolution.py resolves the values of one run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apcbatch.formats import FORMAT_CHOICES, REASONING_PARSERS, TOOL_PARSERS, TURNS, Turns
from apcbatch.option_values import Kind, Spec, shown
from apcbatch.sampling import LONGEST_STOP_TEXT, MOST_STOP_TEXTS, MOST_TOKENS, SETTINGS
from apcbatch.types import POLICIES, Policy

ENV_PREFIX = "APCBATCH_"
ENV_DEBUG = "APCBATCH_DEBUG"
ENV_CONFIG = "APCBATCH_CONFIG"

DEFAULT_POLICY = "planned"
MOST_CONVERSATIONS = 2**31 - 1
MOST_RUNNING = 1 << 16
MOST_GPUS = 1 << 6
MOST_STOP_TOKENS = 1 << 10
MOST_BYTES = 1 << 60
MOST_WORKERS = 1 << 12
MOST_THREADS = 1 << 10
MOST_WORKER_CPUS = 1 << 10
MOST_SECONDS = 1 << 20
MOST_NAME = 1 << 10  # characters of a column's name
MOST_PROMPT = 1 << 16  # characters of a system prompt on the command line
COLUMN_OPTIONS = ("messages_column", "prompt_column", "tools_column", "id_column")
KIND_OF: Mapping[type, Kind] = {bool: "switch", int: "integer", float: "number"}


def option(default: Any, group: str, help: str, kind: Kind | None = None, **limits: Any) -> Any:
    """Make a field of Config with its Spec. kind: by default that of the default value. limits: further fields of the
    Spec."""
    kind = kind or KIND_OF.get(type(default), "text")
    spec = Spec(kind, group, help, optional=default is None, **limits)
    return field(default=default, repr=not spec.secret, metadata={"spec": spec})


def setting(name: str, **limits: Any) -> Any:
    """Make the option of a sampling setting, with the default and the bounds of its row in sampling.py.

    limits: further Spec fields, for a setting that is not a number.
    """
    row = SETTINGS[name]
    bounds = row.option_bounds or row.bounds
    if bounds is not None:
        limits = {"above" if bounds.above else "minimum": bounds.least, "maximum": bounds.most}
    default = row.default if row.option_default is None else row.option_default
    return option(default, "Generation", row.help, **limits)


def default_pool_size() -> int:
    """Return a quarter of this machine's memory, at most 4 GiB, in bytes."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4, 4 << 30)


@dataclass(frozen=True)
class Config:
    """The resolved options of one run. Sizes are in bytes. origins: source of each value, such as `default` or a
    flag."""

    model: str = option(
        "demo",
        "Model",
        "The model: a folder, a hub id that is in the local cache, or a bundled one: `demo`, `demo-jamba`.",
        metavar="DIR|HF-ID|demo",
        path="local",
    )
    dtype: str = option(
        "float32",
        "Model",
        "Type of weights and activations; recurrent states are float32 always.",
        choices=("float32", "bfloat16"),
    )
    device: str = option(
        "auto",
        "Model",
        "Where to compute; auto takes CUDA if it is there.",
        choices=("auto", "cpu", "cuda"),
        meant={"gpu": "cuda"},
    )
    gpus: int = option(
        1,
        "Model",
        "Spread the layers over so many GPUs of this host, because the model is larger than one or to be faster; on a "
        "cluster, over as many of each worker's.",
        minimum=1,
        maximum=MOST_GPUS,
    )
    exact: bool = option(
        True,
        "Model",
        "On CUDA, add the inputs of every product in one order, so that cached answers equal cold ones bit for bit, as "
        "they always do on the CPU; --fast leaves products of more than 128 rows to the libraries.",
        opposite="--fast",
    )
    isa: str | None = option(
        None,
        "Model",
        "Instruction set of the CPU kernels; the best one is found by default.",
        choices=("amx", "avx512bf16", "avx512", "avx2", "plain"),
        flag=None,
    )
    threads: int | None = option(
        None,
        "Model",
        "Threads of the CPU kernels; by default one for each core that this process may use.",
        kind="integer",
        minimum=1,
        maximum=MOST_THREADS,
    )

    format: str = option(
        "auto",
        "Input",
        "What a line is; auto decides line by line.",
        choices=FORMAT_CHOICES,
    )
    messages_column: str | None = option(
        None, "Input", "The column, or key of a line, that holds the messages.", metavar="NAME", maximum=MOST_NAME
    )
    prompt_column: str | None = option(
        None,
        "Input",
        "The one that holds a prompt: messages, or what the user says as a text.",
        metavar="NAME",
        maximum=MOST_NAME,
    )
    tools_column: str | None = option(None, "Input", "The one that holds the tools.", metavar="NAME", maximum=MOST_NAME)
    id_column: str | None = option(
        None, "Input", "The one that holds the conversation's id.", metavar="NAME", maximum=MOST_NAME
    )
    strict_model: bool = option(
        False, "Input", "Refuse a request that names another model than --model; else that is a warning."
    )
    turns: Turns = option(
        "each",
        "Input",
        "Which turns are requests: each recorded assistant turn, the last one, or, with rollout, each one "
        "with the generated answers fed back.",
        choices=TURNS,
    )
    limit: int | None = option(
        None, "Input", "Stop after N conversations.", "integer", minimum=0, maximum=MOST_CONVERSATIONS
    )
    window: int = option(
        512,
        "Input",
        "Conversations that are read ahead and planned together at most (policy planned).",
        minimum=1,
        maximum=MOST_CONVERSATIONS,
    )
    window_tokens: int = option(
        1 << 24,
        "Input",
        "Tokens that are read ahead at most, each conversation's history counted once and each request as 256 more; "
        "the last conversation is read whole.",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    order: str = option("auto", "Input", "Order of the work; file keeps the input's.", choices=("auto", "file"))

    max_tokens: int = setting("max_tokens")
    max_request_tokens: int = option(
        1 << 20,
        "Generation",
        "Prompt and new tokens of a request at most, where the model's context does not end it before; a request "
        "beyond is an error record.",
        minimum=2,
        maximum=MOST_TOKENS,
    )
    temperature: float = setting("temperature")
    top_p: float = setting("top_p")
    top_k: int = setting("top_k")
    min_p: float = setting("min_p")
    presence_penalty: float = setting("presence_penalty")
    frequency_penalty: float = setting("frequency_penalty")
    repetition_penalty: float = setting("repetition_penalty")
    min_tokens: int = setting("min_tokens")
    stop: tuple[str, ...] = setting(
        "stop", kind="text", metavar="TEXT", maximum=LONGEST_STOP_TEXT, most=MOST_STOP_TEXTS
    )
    stop_token_id: tuple[int, ...] = setting(
        "stop_token_ids", kind="integer", minimum=0, maximum=MOST_TOKENS, most=MOST_STOP_TOKENS
    )
    generation_config: str = option(
        "none",
        "Generation",
        "auto takes what no option gives from generation_config.json of the model; tokens that end an answer always "
        "come from there.",
        choices=("auto", "none"),
    )
    seed: int = setting("seed")
    ignore_eos: bool = setting("ignore_eos")
    logprobs: bool = setting("logprobs")
    top_logprobs: int = setting("top_logprobs")

    score: bool = option(
        False,
        "Generation",
        "Score the recorded answer of each turn, and generate nothing: log-probabilities, and whether greedy "
        "generation would give it.",
    )
    system_prompt: str | None = option(
        None,
        "Chat",
        "The system message of conversations that have none: a text, or @FILE that holds it.",
        metavar="TEXT|@FILE",
        maximum=MOST_PROMPT,
    )
    template_kwargs: str | None = option(
        None,
        "Chat",
        "Variables for the chat template, as a JSON object; what a line gives itself wins.",
        metavar="JSON",
    )
    tool_parser: str = option(
        "auto",
        "Chat",
        "How tool calls are written in answers; auto reads the chat template. Calls are looked for in the answers to "
        "requests with tools.",
        choices=("auto", *TOOL_PARSERS, "none"),
    )
    reasoning_parser: str = option(
        "auto",
        "Chat",
        "How reasoning is written in answers; auto reads the chat template and the tokenizer.",
        choices=("auto", *REASONING_PARSERS, "none"),
    )

    block_size: int = option(
        64,
        "Reuse",
        "Snapshots lie on multiples of N tokens; 1 is every position.",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    policy: Policy = option(
        DEFAULT_POLICY,
        "Reuse",
        "Which boundaries are kept: those that later requests resume from, all, the last one of each prompt, none.",
        choices=POLICIES,
    )
    min_gain_tokens: int = option(
        64,
        "Reuse",
        "Keep a snapshot for later runs only where it saves so many tokens over the one before it (policy planned).",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    store: str | None = option(None, "Reuse", "Keep snapshots in DIR for later runs.", metavar="DIR", path="local")
    cache_salt: str | None = option(
        None,
        "Reuse",
        "A secret of those who may share snapshots, or @FILE that holds it: runs with another salt, or none, find "
        "none of these.",
        metavar="TEXT|@FILE",
        secret=True,
    )
    store_size: int = option(
        20 << 30, "Reuse", "The store's size on disk at most.", "size", minimum=0, maximum=MOST_BYTES
    )
    pool_size: int = option(
        default_pool_size(),
        "Reuse",
        "Snapshots in RAM at most; a quarter of the memory, but not over 4GiB, by default.",
        "size",
        minimum=0,
        maximum=MOST_BYTES,
    )

    max_batch_tokens: int = option(2048, "Batch", "Prefill tokens of one step at most.", minimum=1, maximum=MOST_TOKENS)
    max_running: int = option(
        32,
        "Batch",
        "Requests that run together at most; with --gpus, so many for each.",
        minimum=1,
        maximum=MOST_RUNNING,
    )

    ray: str | None = option(
        None,
        "Cluster",
        "Run on a Ray cluster: local starts one here, auto joins this machine's, or the address of one's head.",
        metavar="local|auto|HOST:PORT",
    )
    workers: int | None = option(
        None,
        "Cluster",
        "Processes with the model; by default one for each GPU, or else one for each machine.",
        "integer",
        minimum=1,
        maximum=MOST_WORKERS,
    )
    worker_cpus: int | None = option(
        None,
        "Cluster",
        "Cores of a worker, which are its threads; by default as many as let all workers run.",
        "integer",
        minimum=1,
        maximum=MOST_WORKER_CPUS,
    )
    worker_gpus: int | None = option(
        None,
        "Cluster",
        "GPUs of a worker, 0 or 1; by default 1 if the cluster has any and --device allows it.",
        "integer",
        minimum=0,
        maximum=1,
    )
    worker_memory: int | None = option(
        None,
        "Cluster",
        "Memory of a worker, for Ray to place it where there is so much; it is not enforced.",
        "size",
        minimum=1,
        maximum=MOST_BYTES,
    )
    worker_timeout: int = option(
        300,
        "Cluster",
        "Seconds after which a worker is given up that does not go on with its work; a layer takes less.",
        minimum=1,
        maximum=MOST_SECONDS,
    )

    resume: bool = option(False, "Output", "Do only the requests that OUT does not answer yet.")
    overwrite: bool = option(False, "Output", "Replace OUT.")
    retry_errors: bool = option(False, "Output", "Resume, and run again what failed for a reason that may have passed.")
    ordered: bool = option(False, "Output", "Put the lines into input order when the run ends.")
    strict: bool = option(False, "Output", "Stop at the first error record.")
    trace: bool = option(
        True,
        "Output",
        "Keep what `apcbatch report` draws in OUT.trace.jsonl: passes, shared prefixes and their first words.",
    )
    summary: str | None = option(
        None,
        "Output",
        "Write the summary to FILE too, in place of an earlier summary; --overwrite replaces any other file.",
        metavar="FILE",
        path="any",
    )
    report: str | None = option(
        None,
        "Output",
        "Write a page for the browser to FILE when the run ends; see `apcbatch report`.",
        metavar="FILE",
        path="local",
    )
    progress: str = option(
        "auto",
        "Output",
        "auto is a bar on a terminal and plain lines elsewhere.",
        choices=("auto", "bar", "plain", "none"),
    )
    quiet: bool = option(False, "Output", "No line for each request.", flag="-q")
    verbose: bool = option(False, "Output", "Times and settings as well.", flag="-v")

    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def values(self) -> dict[str, Any]:
        """Return the printable value of each option by name, without secrets, in the order of the help."""
        return {name: shown(spec, getattr(self, name)) for name, spec in OPTIONS.items()}


OPTIONS: Mapping[str, Spec] = {
    entry.name: entry.metadata["spec"] for entry in dataclasses.fields(Config) if "spec" in entry.metadata
}


def flag_name(name: str) -> str:
    """Return the flag of an option: `block_size` -> `--block-size`."""
    return "--" + name.replace("_", "-")


def opposite_flag(name: str) -> str:
    """Return the flag that turns off a switch whose default is on: `trace` -> `--no-trace`."""
    return OPTIONS[name].opposite or f"--no-{flag_name(name).removeprefix('--')}"


def env_name(name: str) -> str:
    """Return the environment variable of an option: `block_size` -> `APCBATCH_BLOCK_SIZE`."""
    return ENV_PREFIX + name.upper()
