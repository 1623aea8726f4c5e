"""Make the engine's request for one prompt: the run's options, overridden by the line's settings.

Invariant: the request digest covers every setting that can change the answer. It leaves out a setting that is newer
than the digest and has its default, so that the digests of earlier versions stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from apcbatch.address import reason_of
from apcbatch.config import Config
from apcbatch.data.chat.render import Prompt, Renderer
from apcbatch.data.conversation import Conversation
from apcbatch.data.generation_config import FILE
from apcbatch.data.output.stop_texts import StopTextsFactory
from apcbatch.errors import RequestError, UsageError
from apcbatch.job.logprobs import PromptFields
from apcbatch.job.record import Ticket, request_digest, settings_text
from apcbatch.job.work import Tag
from apcbatch.option_values import FILE_MARK
from apcbatch.resolution import DEFAULT
from apcbatch.sampling import SETTINGS
from apcbatch.types import Request

# FIRST: settings that every digest covers. LATER: settings newer than the digest, with their defaults.
FIRST = [name for name, setting in SETTINGS.items() if setting.in_every_digest]
OPTION_NAMES = {name: setting.option_name for name, setting in SETTINGS.items() if setting.option_name}
LATER = {name: setting.default for name, setting in SETTINGS.items() if not setting.in_every_digest}
MOST_PROMPT_LOGPROBS = 262_144  # per request; each takes about 700 bytes of memory and 75 of the record


def make_request(
    config: Config,
    renderer: Renderer,
    ticket: Ticket,
    conversation: Conversation,
    prompt: Prompt,
    rollout: Any,
    *,
    keep_answer: bool,
) -> Request:
    """Make the request of a conversation's turn, to generate an answer or to score the recorded one. rollout: the
    rollout that the turn belongs to, or None. keep_answer: keep snapshots of the answer, since a later request may
    extend it."""
    if prompt.answer_begin is not None:
        return _scoring(renderer, ticket, conversation, prompt, prompt.answer_begin)
    settings = settings_of(config, conversation.params)
    if "max_tokens" not in conversation.params and config.origins.get("max_tokens", DEFAULT) in (DEFAULT, FILE):
        room = max(1, config.max_request_tokens - len(prompt.token_ids))
        settings["max_tokens"] = max(min(settings["max_tokens"], room), settings.get("min_tokens", 0))
    is_processed = settings["logprobs"] and config.logprobs_mode == "processed"
    signed = settings | _further_settings(conversation) | ({"processed_logprobs": True} if is_processed else {})
    ticket = _signed(ticket, prompt, signed, settings.pop("keeps_stop", False))
    echo, prompt_logprobs = settings.pop("echo", False), settings.pop("prompt_logprobs", None)
    shows_ids = settings.pop("return_token_ids", False)
    if echo or prompt_logprobs is not None:
        text = conversation.prompt if isinstance(conversation.prompt, str) else None
        ticket = replace(
            ticket, prompt=PromptFields(prompt.token_ids, text, echo, settings.get("top_logprobs", 0), prompt_logprobs)
        )
        settings |= _scored_prompt(len(prompt.token_ids), echo, prompt_logprobs, settings)
    if shows_ids:
        ticket = replace(ticket, prompt=replace(ticket.prompt or PromptFields(prompt.token_ids), shows_ids=True))
    stop, structure = settings.pop("stop", ()), settings.pop("structure", None)
    output_parser = renderer.output_parser(conversation, prompt)
    return Request(
        ticket.request_id,
        prompt.token_ids,
        **settings,
        ending=StopTextsFactory(renderer.tokenizer, tuple(stop)) if stop else None,
        constraint=renderer.constraint_factory(structure, output_parser) if structure else None,
        keep_answer=keep_answer,
        tag=Tag(ticket, rollout, output_parser),
        random_stream=ticket.random_stream,
        draft=conversation.draft,
        processed_logprobs=is_processed,
    )


def _scoring(
    renderer: Renderer, ticket: Ticket, conversation: Conversation, prompt: Prompt, answer_begin: int
) -> Request:
    """Make the request that scores a recorded answer. It generates nothing, and ignores all settings."""
    shown = PromptFields(prompt.token_ids, answer_begin=answer_begin)
    ticket = replace(_signed(ticket, prompt, {"answer_begin": answer_begin}), prompt=shown)
    history = replace(prompt, token_ids=prompt.token_ids[:answer_begin])
    return Request(
        ticket.request_id,
        prompt.token_ids,
        max_tokens=0,
        score_from=answer_begin,
        keep_answer=False,
        tag=Tag(ticket, None, renderer.output_parser(conversation, history)),
    )


def _signed(ticket: Ticket, prompt: Prompt, settings: Mapping[str, Any], keeps_stop: bool = False) -> Ticket:
    """Return the ticket with the digest of its prompt and settings."""
    text = settings_text(settings)
    digest = request_digest(text, prompt.token_ids)
    return replace(ticket, settings=text, request_digest=digest, keeps_stop=keeps_stop)


def _scored_prompt(
    num_prompt: int, echo: bool, prompt_logprobs: int | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return score_from and score_top of a request whose record shows the prompt: both if log-probabilities of the
    prompt are requested, only score_from if no answer is generated, and otherwise neither. RequestError for more
    log-probabilities than one record can hold."""
    top = settings.get("top_logprobs", 0) if echo and settings["logprobs"] else 0
    if prompt_logprobs is not None or (echo and settings["logprobs"]):
        top = max(prompt_logprobs or 0, top)
        if num_prompt * (1 + top) > MOST_PROMPT_LOGPROBS:
            raise RequestError(
                "invalid_request",
                f"log-probabilities of {num_prompt:,} prompt tokens and the {top} likeliest beside each are "
                f"{num_prompt * (1 + top):,}; at most {MOST_PROMPT_LOGPROBS:,} are given: ask for fewer "
                "(prompt_logprobs, or logprobs with echo), or shorten the prompt",
            )
        return {"score_from": 1, "score_top": top}
    return {"score_from": num_prompt} if not settings["max_tokens"] else {}


def settings_of(config: Config, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request by name: fields of Request, and stop, keeps_stop, structure, echo and
    prompt_logprobs. Settings newer than the digest are included only if they do not have their defaults.

    --top-logprobs turns on log-probabilities for lines that do not set `logprobs`. It has no effect on lines that turn
    them off.
    """
    run = {name: getattr(config, option) for name, option in OPTION_NAMES.items()}
    run["logprobs"] = config.logprobs or config.top_logprobs > 0
    settings = {**LATER, **run, **params}
    if not settings["logprobs"] and "top_logprobs" not in params:
        settings["top_logprobs"] = 0
    return {name: value for name, value in settings.items() if name in FIRST or value != LATER[name]}


def _further_settings(conversation: Conversation) -> dict[str, Any]:
    """Return the settings that a line's digest covers in addition, each only if the line sets it: its template options
    (`switches`), and `one_call` (at most one tool call)."""
    given = conversation.template_options.given()
    return ({"switches": given} if given else {}) | ({"one_call": True} if conversation.one_call else {})


MAX_BYTES = 4096


def read_salt(config: Config) -> str | None:
    """Return the cache salt of a run, read from its file if --cache-salt names one; None without the option. The line
    end of the file is removed. UsageError if the file holds no salt."""
    given = config.cache_salt
    if given is None or not given.startswith(FILE_MARK):
        return given
    path = given.removeprefix(FILE_MARK)
    where = f"{config.origins['cache_salt']}: the file {path}"
    try:
        with open(path, "rb") as file:
            salt = file.read(MAX_BYTES + 1).rstrip(b"\r\n").decode()
    except (OSError, ValueError) as error:
        why = reason_of(error, path)
        raise UsageError(f"{where} cannot be read as UTF-8 text ({why}); give @ and the file with the salt") from None
    if not 1 <= len(salt.encode()) <= MAX_BYTES:
        raise UsageError(f"{where} holds no salt of 1 to {MAX_BYTES} bytes; put one line of random text into it")
    return salt
