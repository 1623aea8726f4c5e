"""Every option of `run`: type, range, default, help, flag and environment variable.

resolution.py resolves the values of one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from apcbatch.cores import find_memory
from apcbatch.formats import FORMAT_CHOICES, REASONING_PARSERS, TOOL_PARSERS, TURNS, Turns
from apcbatch.option_values import AUTO, Kind, Spec, shown
from apcbatch.sampling import LONGEST_STOP_TEXT, MOST_STOP_TEXTS, MOST_TOKENS, SETTINGS
from apcbatch.types import POLICIES, Policy

ENV_PREFIX = "APCBATCH_"
ENV_DEBUG = "APCBATCH_DEBUG"
ENV_CONFIG = "APCBATCH_CONFIG"

DEFAULT_POLICY = "planned"
UNMEASURED_GAIN = 64  # tokens; --min-gain-tokens auto where nothing is measured
MOST_CONVERSATIONS = 2**31 - 1
MOST_RUNNING = 1 << 16
MOST_GPUS = 1 << 6
MOST_STOP_TOKENS = 1 << 10
MOST_BYTES = 1 << 60
MOST_WORKERS = 1 << 12
MOST_SHARDS = 1 << 12
MOST_THREADS = 1 << 10
MOST_WORKER_CPUS = 1 << 10
MOST_SECONDS = 1 << 20
MOST_TURNS = 1 << 16
MOST_SAMPLES = 1 << 12
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


@dataclass(frozen=True)
class Config:
    """The resolved options of one run. Sizes are in bytes. origins: source of each value, such as `default` or a
    flag. begin: time when they were resolved, in ISO 8601 with its offset; on --resume, the run file's clock."""

    model: str = option(
        "demo",
        "Model",
        "The model: a folder, a hub id that is in the local cache, or a bundled one: `demo`, `demo-jamba`.",
        metavar="DIR|HF-ID|demo",
        path="local",
    )
    adapter: str | None = option(
        None,
        "Model",
        "A LoRA of peft to merge into the weights when they are loaded: the folder that save_pretrained has written.",
        metavar="DIR",
        path="local",
    )
    dtype: str = option(
        AUTO,
        "Model",
        "Type of weights and activations; auto is the checkpoint's own, with bfloat16 in place of float16. Recurrent "
        "states are float32 always.",
        choices=(AUTO, "float32", "bfloat16"),
    )
    weights: str = option(
        AUTO,
        "Model",
        "Quantised weights in memory: encoded as in the files, which takes less memory and less time to read, or "
        "decoded to bfloat16 once; auto is encoded where that is not slower. The answers are the same.",
        choices=(AUTO, "encoded", "decoded"),
    )
    device: str = option(
        "auto",
        "Model",
        "Device; auto is CUDA where a GPU and its kernels are available.",
        choices=("auto", "cpu", "cuda"),
        meant={"gpu": "cuda"},
    )
    gpus: int = option(
        1,
        "Model",
        "Split the layers over N GPUs of this host (pipeline parallelism), for models larger than one GPU or for "
        "throughput; on a cluster, over N GPUs of each worker.",
        minimum=1,
        maximum=MOST_GPUS,
    )
    exact: bool = option(
        True,
        "Model",
        "On CUDA, multiply matrices in a fixed order of sums, so that cached answers equal cold ones bit for bit, as "
        "they always do on the CPU; --fast uses the libraries' products for more than 128 rows.",
        opposite="--fast",
    )
    isa: str | None = option(
        None,
        "Model",
        "Instruction set of the CPU kernels; by default the best one of this processor.",
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
        "auto", "Input", "Format of the lines; auto detects that of each line.", choices=FORMAT_CHOICES
    )
    messages_column: str | None = option(
        None, "Input", "Column, or key of a line, with the messages.", metavar="NAME", maximum=MOST_NAME
    )
    prompt_column: str | None = option(
        None, "Input", "Column with a prompt: messages, or the user's text.", metavar="NAME", maximum=MOST_NAME
    )
    tools_column: str | None = option(None, "Input", "Column with the tools.", metavar="NAME", maximum=MOST_NAME)
    id_column: str | None = option(
        None,
        "Input",
        "Column with the conversation's id; none numbers the lines instead.",
        metavar="NAME|none",
        maximum=MOST_NAME,
    )
    ignore_columns: str | None = option(
        None,
        "Input",
        "Columns to leave out, with commas between, such as data under the name of a setting.",
        metavar="NAME,...",
        maximum=MOST_PROMPT,
    )
    strict_model: bool = option(
        False, "Input", "Refuse a request that names another model than --model, instead of a warning."
    )
    turns: Turns = option(
        "each",
        "Input",
        "Which turns are requests: each, the last, each with answers fed back (rollout), or those of --tools (live).",
        choices=TURNS,
    )
    limit: int | None = option(
        None, "Input", "Stop after N conversations.", "integer", minimum=0, maximum=MOST_CONVERSATIONS
    )
    window_tokens: int = option(
        1 << 24,
        "Input",
        "Maximum tokens to read ahead and plan together (policy planned): shared ones once, plus 128 a request; the "
        "last conversation is read whole.",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    order: str = option("auto", "Input", "Order of the requests; file is that of the input.", choices=("auto", "file"))

    tools: str | None = option(
        None,
        "Live",
        "Your code for --turns live: FACTORY(row) returns an episode (`apcbatch.Tools`). Accepted on the command line "
        "alone.",
        metavar="PACKAGE.MODULE:FACTORY",
        maximum=MOST_NAME,
        from_file=False,
    )
    tool_workers: int = option(4, "Live", "Maximum processes that run the tools.", minimum=1, maximum=MOST_WORKERS)
    tool_timeout: float = option(
        60.0, "Live", "Seconds after which a call of your code is an error.", above=0, maximum=MOST_SECONDS
    )
    tool_memory: int | None = option(
        None, "Live", "Maximum address space of a process that runs tools.", "size", minimum=1 << 26, maximum=MOST_BYTES
    )
    max_turns: int = option(50, "Live", "Maximum answers of an episode.", minimum=1, maximum=MOST_TURNS)
    max_episode_tokens: int = option(
        1 << 20,
        "Live",
        "Maximum tokens of an episode, prompts and answers together; a longer one ends with `context`.",
        minimum=2,
        maximum=MOST_TOKENS,
    )
    samples: int = option(
        1, "Live", "Episodes of each line, each with its own random draws.", minimum=1, maximum=MOST_SAMPLES
    )
    history: str = option(
        "template",
        "Live",
        "What stands for an answer in later prompts: its generated tokens while the chat template keeps its text, or "
        "its tokens always.",
        choices=("template", "tokens"),
    )

    max_tokens: int = setting("max_tokens")
    max_request_tokens: int = option(
        1 << 20,
        "Generation",
        "Maximum prompt and new tokens of a request, within the model's context; a longer request is an error record.",
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
        "auto takes defaults for unset options from the model's generation_config.json; tokens that end an answer are "
        "always taken from it.",
        choices=("auto", "none"),
    )
    seed: int = setting("seed")
    ignore_eos: bool = setting("ignore_eos")
    logprobs: bool = setting("logprobs")
    top_logprobs: int = setting("top_logprobs")
    logprobs_mode: str = option(
        "raw",
        "Generation",
        "What --logprobs are of: the model's logits alone (raw), or the distribution that was drawn from, after "
        "penalties, masks, temperature, top_k, min_p and top_p (processed).",
        choices=("raw", "processed"),
    )
    token_ids: bool = setting("return_token_ids")

    score: bool = option(
        False,
        "Generation",
        "Score the recorded answer of each turn and generate nothing: log-probabilities, and whether greedy decoding "
        "would give it.",
    )
    system_prompt: str | None = option(
        None,
        "Chat",
        "System message of conversations without one: a text, or @FILE to read it from.",
        metavar="TEXT|@FILE",
        maximum=MOST_PROMPT,
    )
    chat_template: str | None = option(
        None, "Chat", "Chat template to use in place of the model's, a file in Jinja.", metavar="FILE", path="local"
    )
    template_kwargs: str | None = option(
        None, "Chat", "Variables of the chat template, as a JSON object; a line's own values win.", metavar="JSON"
    )
    template_date: str | None = option(
        None,
        "Chat",
        "Date that the chat template reads (strftime_now); by default the time when the run began, on --resume too.",
        "date",
        metavar="YYYY-MM-DD",
    )
    tool_parser: str = option(
        "auto",
        "Chat",
        "Format of tool calls in answers; auto detects it from the chat template and the tokenizer. Answers are parsed "
        "for calls only if the request has tools.",
        choices=("auto", *TOOL_PARSERS, "none"),
    )
    reasoning_parser: str = option(
        "auto",
        "Chat",
        "Format of reasoning in answers; auto detects it from the chat template and the tokenizer.",
        choices=("auto", *REASONING_PARSERS, "none"),
    )

    block_size: int = option(
        64,
        "Reuse",
        "Tokens between snapshots; those that a plan keeps for its own run lie anywhere.",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    policy: Policy = option(
        DEFAULT_POLICY,
        "Reuse",
        "Snapshots to keep: those that later requests resume from, all, the last of each prompt, or none.",
        choices=POLICIES,
    )
    min_gain_tokens: int | None = option(
        None,
        "Reuse",
        "Keep a snapshot for later runs only if it saves N tokens over the previous one (policy planned); auto is as "
        "many as are computed here in the time of reading a snapshot, measured once for a store.",
        "integer",
        metavar="N|auto",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    store: str | None = option(None, "Reuse", "Keep snapshots in DIR for later runs.", metavar="DIR", path="local")
    cache_salt: str | None = option(
        None,
        "Reuse",
        "Secret that separates users of a store, or @FILE to read it from: a run finds only snapshots of its own salt.",
        metavar="TEXT|@FILE",
        secret=True,
    )
    store_size: int = option(
        20 << 30, "Reuse", "Maximum size of the store on disk.", "size", minimum=0, maximum=MOST_BYTES
    )
    pool_size: int = option(
        min(find_memory() // 4, 4 << 30),
        "Reuse",
        "Maximum size of snapshots in memory; by default a quarter of the RAM, at most 4GiB.",
        "size",
        minimum=0,
        maximum=MOST_BYTES,
    )

    draft: str = option(
        "auto",
        "Draft",
        "Draft the next tokens of answers and verify several in one pass; no answer changes by a bit. auto is every "
        "source that applies, or none with --fast. Or several, with commas between: recorded, the answers in INPUT; "
        "previous, those of --draft-from; siblings, the other answers to a prompt; history, earlier prompts and "
        "answers of the run; lookup, the request itself.",
        metavar="auto|none|SOURCE,...",
        maximum=MOST_NAME,
    )
    draft_from: str | None = option(
        None,
        "Draft",
        "Draft answers from those with the same custom_id in FILE, the OUT of an earlier run (source previous).",
        metavar="FILE",
        path="local",
    )
    draft_memory: int = option(
        64 << 20,
        "Draft",
        "Maximum size of the index of prompts and answers in which drafts are found.",
        "size",
        minimum=0,
        maximum=MOST_BYTES,
    )

    max_batch_tokens: int = option(2048, "Batch", "Maximum prefill tokens of a step.", minimum=1, maximum=MOST_TOKENS)
    max_running: int = option(
        32, "Batch", "Maximum concurrent requests; with --gpus, for each GPU.", minimum=1, maximum=MOST_RUNNING
    )

    shard: str | None = option(
        None,
        "Cluster",
        "Answer the I-th of N parts of INPUT, into an OUT of its own; `apcbatch merge` joins the OUTs of all N.",
        "shard",
        metavar="I/N",
        maximum=MOST_SHARDS,
    )
    ray: str | None = option(
        None,
        "Cluster",
        "Run on a Ray cluster: local starts one here, auto joins this machine's, HOST:PORT the one with that head.",
        metavar="local|auto|HOST:PORT",
    )
    workers: int | None = option(
        None,
        "Cluster",
        "Worker processes, each with the whole model; by default one for each GPU, or else for each machine.",
        "integer",
        minimum=1,
        maximum=MOST_WORKERS,
    )
    worker_cpus: int | None = option(
        None,
        "Cluster",
        "Cores, and threads, of a worker; by default an equal share of the cores.",
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
        "Memory that Ray reserves when it places a worker; not enforced.",
        "size",
        minimum=1,
        maximum=MOST_BYTES,
    )
    worker_timeout: int = option(
        300,
        "Cluster",
        "Seconds without progress after which a worker counts as lost; one layer must take less.",
        minimum=1,
        maximum=MOST_SECONDS,
    )

    resume: bool = option(
        False,
        "Output",
        "Run only the requests that OUT does not answer yet, also of an INPUT that was corrected or has grown. The "
        "model, and options that change answers, are those of OUT.run.json where they are not given.",
    )
    overwrite: bool = option(False, "Output", "Replace OUT.")
    retry_errors: bool = option(False, "Output", "Resume, and run retryable error records again.")
    ordered: bool = option(False, "Output", "Sort the lines into input order when the run ends.")
    strict: bool = option(False, "Output", "Stop at the first error record.")
    summary: str | None = option(
        None,
        "Output",
        "Write the summary to FILE too, in place of an earlier summary; --overwrite replaces any other file.",
        metavar="FILE",
        path="any",
        is_output=True,
    )
    report: str | None = option(
        None,
        "Output",
        "Write a page for the browser to FILE when the run ends; see `apcbatch report`.",
        metavar="FILE",
        path="local",
        is_output=True,
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
    begin: str = field(
        default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"), compare=False, repr=False
    )

    @property
    def template_clock(self) -> str:
        """The time that the chat template reads for each prompt of the run: a date, or ISO 8601 with an offset."""
        return self.template_date or self.begin

    @property
    def is_planned(self) -> bool:
        """Whether requests are planned. Those of a rollout are not, as their prompts are not known yet."""
        return self.policy == "planned" and self.turns not in ("rollout", "live")

    @property
    def gain_tokens(self) -> int:
        """Value of --min-gain-tokens; UNMEASURED_GAIN while auto is not resolved."""
        return UNMEASURED_GAIN if self.min_gain_tokens is None else self.min_gain_tokens

    def values(self) -> dict[str, Any]:
        """Return the printable value of each option by name, without secrets, in the order of the help."""
        return {name: shown(spec, getattr(self, name)) for name, spec in OPTIONS.items()}


OPTIONS: Mapping[str, Spec] = {
    entry.name: entry.metadata["spec"] for entry in dataclasses.fields(Config) if "spec" in entry.metadata
}


def flag_name(name: str) -> str:
    """Return the flag of an option: `block_size` -> `--block-size`."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """Return the environment variable of an option: `block_size` -> `APCBATCH_BLOCK_SIZE`."""
    return ENV_PREFIX + name.upper()
