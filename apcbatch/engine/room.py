"""How many new tokens a request may have: its own wish, the model's context, the ceiling for any request.

Must not know: tensors, the batch. It is the one place where a request's numbers are held against what there is room
for; the planner and the engine ask it alike.
"""

from __future__ import annotations

from apcbatch.errors import RequestError

MAX_REQUEST_TOKENS = 1 << 20


def room_for_answer(
    num_prompt: int, max_tokens: int, context_length: int | None, max_request_tokens: int
) -> int:
    """The new tokens at most; RequestError context_length_exceeded where there is no room for the request.

    context_length: None where the model has no limit of its own; where it has one, the answer ends there.
    """
    room = max_tokens
    if context_length is not None:
        if num_prompt + 1 > context_length:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_prompt} tokens and the model's context holds {context_length}, one of them for "
                "the answer; shorten the conversation",
            )
        room = min(room, context_length - num_prompt)
    if num_prompt + room > max_request_tokens:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}; together at most "
            f"{max_request_tokens} are served: lower one of them, or raise --max-request-tokens",
        )
    return room
