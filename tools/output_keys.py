"""Keys of an output record, of the summary and of the processes in a run file, each with type and meaning: the tables
of docs/reference/formats.md.

tests/job/test_output_keys.py compares the list with the lines of real runs: a key that is written and not listed, or
listed and never written, fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from apcbatch.job.processes import End, Process


@dataclass(frozen=True, slots=True)
class Key:
    """One key. path: with dots, and `[]` for each item of a list. type: JSON's, `or null` where that is possible; what
    an `object of` or a `list of` something holds is not listed further."""

    path: str
    type: str
    meaning: str


RECORD: tuple[Key, ...] = (
    Key("id", "string", "the request's number in the input, `apc-000017`, from 0"),
    Key("custom_id", "string or null", "a batch line's own; else `<conversation>#<turn>`; null if a line tells none"),
    Key("line", "integer", "the line of INPUT, from 1"),
    Key("turn", "integer or null", "the assistant's turn, from 1; null if the record answers the line as a whole"),
    Key("response", "object or null", "null if the request failed"),
    Key("response.status_code", "integer", "200"),
    Key("response.request_id", "string", "`id` again"),
    Key("response.body", "object", "an `openai.types.chat.ChatCompletion` or `openai.types.Completion`"),
    Key("response.body.id", "string", "`id` again"),
    Key("response.body.object", "string", "`chat.completion` or `text_completion`"),
    Key("response.body.created", "integer", "when the line was written, in seconds since 1970 (UTC)"),
    Key("response.body.model", "string", "`--model`"),
    Key("response.body.choices", "list", "the answers"),
    Key("response.body.choices[].index", "integer", "the answer's number, from 0"),
    Key("response.body.choices[].finish_reason", "string", "`stop`, `length`, or `tool_calls` where tools are called"),
    Key("response.body.choices[].message", "object", "of a chat"),
    Key("response.body.choices[].message.role", "string", "`assistant`"),
    Key(
        "response.body.choices[].message.content", "string or null", "the text; null beside calls if it would be empty"
    ),
    Key("response.body.choices[].message.refusal", "null", "always null"),
    Key("response.body.choices[].message.reasoning_content", "string", "what was thought before, if anything was"),
    Key("response.body.choices[].message.tool_calls", "list", "empty without calls"),
    Key("response.body.choices[].message.tool_calls[].id", "string", "the call's name"),
    Key("response.body.choices[].message.tool_calls[].type", "string", "`function`"),
    Key("response.body.choices[].message.tool_calls[].function", "object", "what is called"),
    Key("response.body.choices[].message.tool_calls[].function.name", "string", "the tool's name"),
    Key("response.body.choices[].message.tool_calls[].function.arguments", "string", "an object as JSON text"),
    Key("response.body.choices[].text", "string", "of a completion: the new text"),
    Key("response.body.choices[].logprobs", "object or null", "if log-probabilities were asked for"),
    Key("response.body.choices[].logprobs.content", "list", "of a chat: one entry for each new token"),
    Key("response.body.choices[].logprobs.content[].token", "string", "the token's text; a special one by its name"),
    Key("response.body.choices[].logprobs.content[].logprob", "number", "float32, before temperature"),
    Key(
        "response.body.choices[].logprobs.content[].bytes",
        "list of integers or null",
        "UTF-8; null for a part of a character",
    ),
    Key(
        "response.body.choices[].logprobs.content[].top_logprobs",
        "list",
        "the likeliest tokens, as many as were asked for",
    ),
    Key("response.body.choices[].logprobs.content[].top_logprobs[].token", "string", "as above"),
    Key("response.body.choices[].logprobs.content[].top_logprobs[].logprob", "number", "as above"),
    Key("response.body.choices[].logprobs.content[].top_logprobs[].bytes", "list of integers or null", "as above"),
    Key("response.body.choices[].logprobs.refusal", "null", "always null"),
    Key("response.body.choices[].logprobs.tokens", "list of strings", "of a completion: the tokens' texts"),
    Key(
        "response.body.choices[].logprobs.token_logprobs", "list of numbers", "of a completion: their log-probabilities"
    ),
    Key(
        "response.body.choices[].logprobs.top_logprobs",
        "list of objects or null",
        "of a completion: the likeliest tokens of each place by their texts, if they were asked for",
    ),
    Key("response.body.choices[].logprobs.text_offset", "list of integers", "of a completion: where each token begins"),
    Key("response.body.choices[].token_ids", "list of integers", "with `return_token_ids`: the new tokens"),
    Key("response.body.prompt_token_ids", "list of integers", "with `return_token_ids`: the prompt"),
    Key("response.body.usage", "object", "tokens"),
    Key("response.body.usage.prompt_tokens", "integer", "of the prompt"),
    Key("response.body.usage.completion_tokens", "integer", "new ones, the stop token included"),
    Key("response.body.usage.total_tokens", "integer", "both"),
    Key("response.body.usage.prompt_tokens_details", "object", "of the prompt's tokens"),
    Key("response.body.usage.prompt_tokens_details.cached_tokens", "integer", "those whose state was restored"),
    Key("error", "object or null", "null if and only if the request succeeded"),
    Key("error.code", "string", "one of [the codes](api.md#errors)"),
    Key("error.message", "string", "what was expected, what came, what to do"),
    Key("error.line", "integer", "the line of INPUT"),
    Key("error.retryable", "boolean", "whether `--retry-errors` would run it again"),
    Key("apcbatch", "object", "what apcbatch adds; a failed request has only the first four"),
    Key("apcbatch.conversation", "string or null", "the line's `id`; null if it could not be read"),
    Key("apcbatch.line_digest", "string", "xxh3-128 of the line, for `--resume`"),
    Key(
        "apcbatch.line_key",
        "string or null",
        "of a line without an id: digest of its content, and the number of equal lines before it, for `--resume`",
    ),
    Key(
        "apcbatch.request_digest",
        "string or null",
        "of settings and prompt tokens, for `--resume`; null without a prompt",
    ),
    Key("apcbatch.cached_from", "string", "`memory`, `disk` or `none`"),
    Key("apcbatch.cached_tokens", "integer", "prompt tokens whose state was restored"),
    Key("apcbatch.computed_tokens", "integer", "the other prompt tokens"),
    Key(
        "apcbatch.ideal_cached_tokens",
        "integer or null",
        "the longest prefix that something earlier covered; null if not known",
    ),
    Key("apcbatch.boundary", "integer", "the position that was resumed from: `cached_tokens`"),
    Key(
        "apcbatch.miss_reason",
        "string or null",
        "[why](../caching.md#why-a-request-missed) less than the ideal was restored",
    ),
    Key("apcbatch.finish_reason", "string", "how the tokens ended: `stop` or `length`, also where tools are called"),
    Key(
        "apcbatch.stop_reason",
        "string or integer or null",
        "the stop text or token of the request that ended it",
    ),
    Key("apcbatch.prefill_ms", "number", "the request's share of the passes over its prompt"),
    Key("apcbatch.decode_ms", "number", "and of those over its answer"),
    Key(
        "apcbatch.begin_s",
        "number or null",
        "when it was admitted, in seconds since `begin` of [the run file](#the-processes-of-a-run), or of the process "
        "without one; null of an error and of `LLM`",
    ),
    Key("apcbatch.end_s", "number or null", "when it ended; null of `LLM`"),
    Key("apcbatch.drafted_tokens", "integer", "drafted tokens that passes verified, of all answers"),
    Key("apcbatch.accepted_tokens", "integer", "those of them that were right"),
    Key("apcbatch.warnings", "list of strings", "what was honoured or read only in part"),
    Key("apcbatch.warning_kinds", "list of strings", "the [kind](#kinds-of-warnings) of each of them"),
    Key("apcbatch.completion_token_ids", "list of integers", "the new tokens, the stop token included"),
    Key(
        "apcbatch.episode", "string", "of a live episode: its line's `id`, and its number behind a `/` with `--samples`"
    ),
    Key("apcbatch.attempt", "integer", "of a live episode: 1, and one more each time that it was begun anew"),
    Key("apcbatch.history", "string", "of a live episode: `--history`"),
    Key("apcbatch.appended", "list of objects", "of a live episode: the messages behind this answer"),
    Key("apcbatch.appended_digest", "string", "their SHA-256, cut, for `--resume`"),
    Key("apcbatch.tools", "list", "of a live episode: one entry for each call in the answer"),
    Key("apcbatch.tools[].name", "string", "the tool's name"),
    Key("apcbatch.tools[].seconds", "number", "that the call took"),
    Key("apcbatch.tools[].error", "string or null", "`unknown_tool`, or that the result was cut"),
    Key(
        "apcbatch.sampled",
        "list of lists",
        "of a live episode: [begin, end) of the prompt's tokens that the model sampled",
    ),
    Key("apcbatch.end", "string or null", "of an episode's last turn: `done`, `max_turns`, `context` or `error`"),
    Key("apcbatch.transcript", "list of objects", "of an episode that failed: its messages up to there"),
    Key("apcbatch.file", "string", "with several inputs: the file of the line"),
    Key("apcbatch.file_line", "integer", "with several inputs: the line in that file, from 1"),
    Key("apcbatch.choices", "list", "of several answers: what each has beside the body's keys"),
    Key("apcbatch.choices[].completion_token_ids", "list of integers", "the new tokens"),
    Key("apcbatch.choices[].finish_reason", "string", "as above"),
    Key("apcbatch.choices[].stop_reason", "string or integer or null", "as above"),
    Key(
        "apcbatch.prompt_logprobs",
        "list of entries",
        "with `prompt_logprobs`: for each prompt token null (the first) or, by their ids, itself and the likeliest "
        "ones, each with `logprob`, `rank` and `decoded_token`",
    ),
    Key(
        "apcbatch.score",
        "object or null",
        "with `--score`: what the model makes of the recorded answer; of an episode's end: what its `score` returned",
    ),
    Key("apcbatch.score.tokens", "integer", "tokens of the recorded answer"),
    Key("apcbatch.score.logprob_sum", "number", "the sum of their log-probabilities"),
    Key("apcbatch.score.greedy_matches", "integer", "tokens that are the likeliest"),
    Key("apcbatch.score.exact_match", "boolean", "whether all are"),
    Key("apcbatch.score.token_ids", "list of integers", "the tokens"),
    Key("apcbatch.score.token_logprobs", "list of numbers", "of each its log-probability"),
    Key("apcbatch.score.token_ranks", "list of integers", "of each its place among all tokens, from 1"),
)

SUMMARY: tuple[Key, ...] = (
    Key("requests", "integer", "answered by this process, error records included"),
    Key("ok", "integer", "those that succeeded"),
    Key("errors", "integer", "error records"),
    Key("errors_by_code", "object of integers", "error records by [code](api.md#errors)"),
    Key("ignored_columns", "object of integers", "conversations by the column that took no part in their answers"),
    Key("already_done", "integer", "answered in OUT before `--resume`"),
    Key("answers_without_line", "integer", "answers in OUT whose line INPUT no longer has"),
    Key("restarted", "integer", "live episodes that were begun anew, as what OUT has of them did not fit"),
    Key("idle_s", "number", "seconds in which live episodes waited for tools, and there was nothing to compute"),
    Key("finish_reasons", "object of integers", "answers (choices of the requests that succeeded) by finish_reason"),
    Key("empty_answers", "integer", "those of them without content and without a call"),
    Key("unread_calls", "integer", "those in which a tool call begins that cannot be read"),
    Key("answer_warnings", "object of integers", "warnings of records by [kind](#kinds-of-warnings)"),
    Key("prompt_tokens", "integer", "of the requests that succeeded"),
    Key("cached_tokens", "integer", "prompt tokens whose state was restored"),
    Key("computed_tokens", "integer", "the other prompt tokens"),
    Key("unique_tokens", "integer", "prompt tokens that no earlier prompt of this run had, as a prefix"),
    Key("unique_tokens_is_bound", "boolean", "`unique_tokens` may be off: the bounded tree of prompts forgot some"),
    Key("completion_tokens", "integer", "new tokens"),
    Key("hit_rate", "number", "cached over prompt tokens"),
    Key("ideal_hit_rate", "number or null", "the same with all that earlier requests covered; null if not known"),
    Key("ideal_is_bound", "boolean", "the true rate may be higher: the bounded tree of prompts forgot some"),
    Key("cached_by_source", "object of integers", "cached tokens from `memory` and from `disk`"),
    Key("miss_reasons", "object of integers", "requests by [reason](../caching.md#why-a-request-missed)"),
    Key("store_bytes_written", "integer", "to the store"),
    Key("store_bytes_read", "integer", "from the store"),
    Key(
        "store_skipped",
        "integer",
        "snapshots that were not stored: no room under `--store-size`, a full queue, a parent that is not stored, or "
        "an error of the system",
    ),
    Key("snapshots_written", "integer", "kept in memory or on disk"),
    Key("snapshots_read", "integer", "those of them that were restored at least once"),
    Key("snapshots_for_later", "integer", "kept for future runs alone; not among `snapshots_written`"),
    Key("snapshots_evicted", "integer", "dropped for want of room"),
    Key("peak_live_snapshots", "integer", "the most in memory at once"),
    Key("preempted", "integer", "times that an answer was stopped for want of room for KV, to go on later"),
    Key(
        "recomputed_tokens",
        "integer",
        "prompt and new tokens that were computed again for these; not among `computed_tokens`",
    ),
    Key(
        "drafts",
        "object of objects",
        "tokens by [source](cli.md#apcbatch-run): `drafted` and verified, and of these `accepted`",
    ),
    Key(
        "tokens_per_pass",
        "number or null",
        "new tokens, without the first of each answer, over the passes in which their answers decoded",
    ),
    Key(
        "drafts_saved_s",
        "number or null",
        "seconds of decoding that drafts saved, [estimated](../speculation.md#seconds-saved); null if not known",
    ),
    Key(
        "workers",
        "list or null",
        "of a run with `--ray`: each worker that was there or was lost; else null. The printed summary has 16 of "
        "them, and the number of the others as `workers_left_out`",
    ),
    Key("workers[].id", "integer", "its number, as lines name it"),
    Key("workers[].node", "string", "its machine; empty if it was never ready"),
    Key("workers[].device", "string", "`cpu` or `cuda`"),
    Key("workers[].units", "integer", "units that it ended"),
    Key("workers[].requests", "integer", "that it answered, errors among them"),
    Key("workers[].prefill_tokens", "integer", "prompt tokens that it computed for answers"),
    Key("workers[].decode_tokens", "integer", "new tokens, without the first of each answer"),
    Key("workers[].cached_tokens", "integer", "prompt tokens whose state it restored"),
    Key("workers[].busy_s", "number", "seconds of its engine that these took"),
    Key("workers[].states_received", "integer", "states that it fetched from another machine"),
    Key("workers[].states_missing", "integer", "states that it could not have, and computed again"),
    Key("workers[].requests_unfinished", "integer", "that it had when it was lost; others run them"),
    Key("workers[].tokens_per_s", "number or null", "prefill and decode tokens over those seconds"),
    Key("workers[].ending", "string or null", "`lost`, or null"),
    Key("score", "object or null", "of `--score`, else null"),
    Key("score.answers", "integer", "recorded answers that were scored"),
    Key("score.tokens", "integer", "their tokens"),
    Key("score.mean_logprob", "number or null", "the mean log-probability of a token"),
    Key("score.perplexity", "number or null", "exp of minus that mean"),
    Key("score.greedy_match_share", "number or null", "the share of tokens that are the likeliest"),
    Key("score.exact_match_share", "number or null", "the share of answers of which all tokens are"),
    Key("seconds", "object", "wall time"),
    Key("seconds.load", "number", "until the first request could begin"),
    Key("seconds.plan", "number", "planning"),
    Key("seconds.prefill", "number", "passes, as far as they computed prompts"),
    Key("seconds.decode", "number", "passes, as far as they computed answers"),
    Key("seconds.store", "number", "waiting for the store, and scheduling"),
    Key("seconds.total", "number", "from the start to the summary"),
    Key("prefill_tokens_per_s", "number or null", "computed and recomputed tokens over seconds of prefill"),
    Key(
        "decode_tokens_per_s", "number or null", "new tokens, without the first of each answer, over seconds of decode"
    ),
    Key("peak_rss_bytes", "integer", "memory of the process"),
    Key("peak_device_bytes", "integer or null", "memory of the CUDA devices"),
    Key("peak_draft_bytes", "integer", "memory of the index that `--draft-memory` bounds, of one engine"),
    Key("warnings", "list of strings", "each warning of the run, once"),
    Key("block_size", "integer", "`--block-size`"),
    Key("policy", "string", "`--policy`"),
    Key("model", "string", "`--model`"),
    Key("dtype", "string", "`--dtype`, `auto` resolved"),
    Key("device", "string or null", "`cpu` or `cuda`; null where nothing was left to answer"),
    Key("gpus", "integer", "over how many CUDA devices the layers are spread, 1 on the CPU"),
    Key("version", "string", "of apcbatch"),
)


_TYPES = {
    "str": "string",
    "str | None": "string or null",
    "int": "integer",
    "float": "number",
    "list[tuple[str, Any, str]]": "list of lists",
    "dict[str, Any]": "object",
    "End | None": "object or null",
}


def _fields(kind: type, path: str) -> Iterator[Key]:
    """Yield the fields of a dataclass, whose metadata has their meaning."""
    for one in dataclasses.fields(kind):
        yield Key(f"{path}.{one.name}", _TYPES[str(one.type)], one.metadata["meaning"])


PROCESSES: tuple[Key, ...] = (
    Key("begin", "number or null", "when the first of all processes began, in seconds since 1970 (UTC)"),
    Key("dropped_processes", "integer", "older processes whose entries were dropped: 64 are kept, in at most 1 MiB"),
    Key("processes", "list", "the processes that worked on OUT, oldest first"),
    *_fields(Process, "processes[]"),
    Key("processes[].machine.cpu", "string", "the processor"),
    Key("processes[].machine.cores", "integer", "that the process might use"),
    Key("processes[].machine.threads", "integer or null", "of torch"),
    Key("processes[].machine.memory_bytes", "integer", "of the machine"),
    Key("processes[].machine.gpu", "string or null", "the CUDA device, if one was used"),
    Key("processes[].machine.system", "string", "system, release and architecture"),
    Key("processes[].machine.python", "string", "its version"),
    Key("processes[].machine.torch", "string or null", "its version"),
    Key("processes[].machine.instructions", "string or null", "the instruction set of the CPU kernels"),
    *_fields(End, "processes[].end"),
)


def table(keys: tuple[Key, ...]) -> Iterator[str]:
    """One row a key."""
    yield "| key | type | meaning |"
    yield "|---|---|---|"
    for key in keys:
        yield f"| `{key.path}` | {key.type} | {key.meaning} |"
