"""How many new tokens a request may have: as many as it asks for, unless the model's context ends before.

Must not know: tensors, the batch. This is the one place that compares a request's numbers with the room there is; the
survey of an input and the engine both ask it.
"""

from __future__ import annotations

from apcbatch.errors import RequestError

MAX_REQUEST_TOKENS = 1 << 20


def room_for_answer(num_prompt: int, max_tokens: int, context_length: int | None, max_request_tokens: int) -> int:
    """The most new tokens; RequestError context_length_exceeded if there is no room for the request.

    context_length: the model's own limit, at which the answer ends, or None. max_request_tokens: the ceiling for prompt
    and answer of any request.
    """
    room = max_tokens
    if context_length is not None:
        if num_prompt + min(1, max_tokens) > context_length:
            answer = ", one of them for the answer" if max_tokens else ""
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_prompt} tokens and the model's context holds {context_length}{answer}; "
                "shorten the conversation",
            )
        room = min(room, context_length - num_prompt)
    if num_prompt + room > max_request_tokens:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}; together at most "
            f"{max_request_tokens} are served: lower one of them, or raise --max-request-tokens",
        )
    return room
