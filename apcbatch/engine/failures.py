"""Why a request that began, or was to begin, has no answer: each reason as a RequestError.

Must not know: what the request holds, who gives it back.
"""

from __future__ import annotations

from apcbatch.engine.sequence import Sequence
from apcbatch.errors import RequestError
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.place import ran_out_of_memory


def no_room(sequence: Sequence) -> RequestError:
    """Even if it ran alone, the KV of all its tokens would not fit."""
    return RequestError(
        "out_of_memory",
        f"the KV of {sequence.limit} tokens, the prompt and its answer ({-(-sequence.limit // PAGE_TOKENS)} pages), "
        "does not fit; raise --pool-size or ask for fewer new tokens",
    )


def not_finite() -> RequestError:
    """Its states or logits hold NaN or infinity."""
    return RequestError(
        "non_finite",
        "the model's numbers became NaN or infinite for this request, so that it has no answer; check the "
        "checkpoint's weights, or try another --dtype",
    )


def failed_pass(error: Exception) -> RequestError:
    """A pass with this request in it raised."""
    if ran_out_of_memory(error):
        return RequestError("out_of_memory", "memory ran out in a pass with this request; run it again")
    return RequestError("internal", f"{error!r} in a pass with this request; run it again")


def failed_choice(error: Exception) -> RequestError:
    """No token could be chosen for it, or what it brought to choose and end its answer raised."""
    if isinstance(error, RequestError):
        return error
    return RequestError("internal", f"{error!r} while this request's next token was chosen; run it again")
