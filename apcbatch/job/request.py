"""The engine's request for one prompt: the run's options, and over them what the line sets.

Must not know: which prompts there are, how requests run. Invariant: the digest covers every setting that can change the
answer; a setting that has its default is left out of it if it is newer than the digest, so that answers of earlier
versions stay answers to the same request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from apcbatch.config import Config
from apcbatch.data.records import Conversation
from apcbatch.data.render import Prompt, Renderer
from apcbatch.data.stop_texts import StopRule
from apcbatch.errors import RequestError
from apcbatch.job.record import Ticket, request_digest
from apcbatch.job.shown_prompt import ShownPrompt
from apcbatch.job.work import OpenRollout, Tag
from apcbatch.types import Request

# The settings that the digest has always covered, and the later ones with their defaults.
FIRST = ("max_tokens", "temperature", "top_p", "seed", "ignore_eos", "logprobs")
LATER: Mapping[str, Any] = {
    "top_logprobs": 0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "keeps_stop": False,
    "structure": None,
    "n": 1,
    "echo": False,
    "prompt_logprobs": None,
}
MOST_PROMPT_LOGPROBS = 262_144  # of one request: about 700 bytes of memory and 75 of its record for each
OPTION_OF = {"stop_token_ids": "stop_token_id"}  # the others are called the same


def make_request(
    config: Config,
    renderer: Renderer,
    ticket: Ticket,
    conversation: Conversation,
    prompt: Prompt,
    rollout: OpenRollout | None,
    *,
    keep_answer: bool,
) -> Request:
    """The request of a turn of a conversation: for an answer, or for the scores of the recorded one. rollout: the one
    that it is a turn of, if it is. keep_answer: something later may build on the answer."""
    if prompt.answer_begin is not None:
        return _scoring(renderer, ticket, conversation, prompt, prompt.answer_begin)
    settings = settings_of(config, conversation.params)
    ticket = replace(
        ticket,
        request_digest=request_digest(ticket, prompt.token_ids, settings | _further_settings(conversation)),
        keeps_stop=settings.pop("keeps_stop", False),
    )
    echo, prompt_logprobs = settings.pop("echo", False), settings.pop("prompt_logprobs", None)
    if echo or prompt_logprobs is not None:
        text = conversation.prompt if isinstance(conversation.prompt, str) else None
        ticket = replace(
            ticket, prompt=ShownPrompt(prompt.token_ids, text, echo, settings.get("top_logprobs", 0), prompt_logprobs)
        )
        settings |= _scored_prompt(len(prompt.token_ids), echo, prompt_logprobs, settings)
    stop, structure = settings.pop("stop", ()), settings.pop("structure", None)
    reading = renderer.reading(conversation, prompt)
    token_ids: Any = prompt.token_ids  # an array serves as the sequence
    return Request(
        ticket.request_id,
        token_ids,
        **settings,
        ending=StopRule(renderer.tokenizer, tuple(stop)) if stop else None,
        constraint=renderer.form(structure, reading) if structure else None,
        keep_answer=keep_answer,
        tag=Tag(ticket, rollout, reading),
        random_stream=ticket.random_stream,
    )


def _scoring(
    renderer: Renderer, ticket: Ticket, conversation: Conversation, prompt: Prompt, answer_begin: int
) -> Request:
    """The request for the scores of a recorded answer; nothing is generated, whatever the settings are."""
    digest = request_digest(ticket, prompt.token_ids, {"answer_begin": answer_begin})
    shown = ShownPrompt(prompt.token_ids, answer_begin=answer_begin)
    ticket = replace(ticket, request_digest=digest, prompt=shown)
    token_ids: Any = prompt.token_ids
    history = replace(prompt, token_ids=prompt.token_ids[:answer_begin])
    return Request(
        ticket.request_id,
        token_ids,
        max_tokens=0,
        score_from=answer_begin,
        keep_answer=False,
        tag=Tag(ticket, None, renderer.reading(conversation, history)),
    )


def _scored_prompt(
    num_prompt: int, echo: bool, prompt_logprobs: int | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What the engine is to say of the prompt: nothing where its text alone is wanted. RequestError for more than one
    record can hold."""
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
    """The settings of a request by the names of Request's fields, and stop, keeps_stop and structure; of the later ones
    those that do not have their defaults.

    Log-probabilities of the likeliest tokens that the run asks for are only for requests with log-probabilities, and
    ask for them where the line does not say.
    """
    options = {name: OPTION_OF.get(name, name) for name in (*FIRST, *LATER)}
    run = {name: getattr(config, option) for name, option in options.items() if hasattr(config, option)}
    run["logprobs"] = config.logprobs or config.top_logprobs > 0
    settings = {**LATER, **run, **params}
    if not settings["logprobs"] and "top_logprobs" not in params:
        settings["top_logprobs"] = 0
    return {name: value for name, value in settings.items() if name in FIRST or value != LATER[name]}


def _further_settings(conversation: Conversation) -> dict[str, Any]:
    """What a line says besides the engine's settings, if it says anything: an answer is not taken for another's."""
    given = conversation.switches.given()
    return ({"switches": given} if given else {}) | ({"one_call": True} if conversation.one_call else {})
