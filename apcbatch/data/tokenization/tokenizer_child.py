"""Child process that runs a tokenizer, or `transformers` over a model folder.

A tokenizer runs here if it has parts that data/tokenization/bounds.py does not know, or if the text is long: a pattern,
a normalizer or a file can take any time and memory. Limits: data/helper_child.py.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from apcbatch.data.helper_child import DONE, MAX_CHARACTERS, REFUSED, Reply, serve
from apcbatch.data.tokenization.bounds import growth

if TYPE_CHECKING:
    import tokenizers


def main() -> None:
    """Answer requests from standard input until it ends."""
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would import it, and it takes gigabytes
    serve(lambda data=None, split_special=False: Tokenise(data, split_special).answer if data else load)


def load(folder: str) -> Reply:
    """Read a folder's tokenizer with `transformers`; reply with JSON, see read_by_transformers in
    data/tokenization/isolated.py."""
    from transformers import PreTrainedTokenizerFast

    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        source = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    else:
        from transformers import AutoTokenizer

        source = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not hasattr(source, "backend_tokenizer"):
            return REFUSED, "it is not converted to a tokenizer.json; convert it, and put that into the folder"
    backend = source.backend_tokenizer
    text = backend.to_str()
    facts = {
        "tokenizer": text,
        "growth": growth(json.loads(text)),
        "special_tokens_map": source.special_tokens_map,
        "chat_template": source.chat_template,
        "split_special": bool(backend.encode_special_tokens),
    }
    return DONE, json.dumps(facts)


class Tokenise:
    """One tokenizer without truncation and padding. data: bytes of its tokenizer.json. split_special: tokenise special
    tokens in a text like any other text."""

    def __init__(self, data: bytes, split_special: bool) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_buffer(data)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = split_special

    def answer(self, what: str, *values: Any) -> Reply:
        """Answer the request `facts`, `encode` or `decode`. values: its arguments."""
        functions: dict[str, Callable[..., Reply]] = {"facts": _facts, "encode": _encode, "decode": _decode}
        return functions[what](self._backend, *values)


def _facts(backend: tokenizers.Tokenizer, names: Sequence[str]) -> Reply:
    """Reply with JSON: [size of the vocabulary, ids of the tokens `names`, added tokens]."""
    added = [
        [number, token.content, {name: getattr(token, name) for name in _FLAGS}]
        for number, token in backend.get_added_tokens_decoder().items()
    ]
    size = backend.get_vocab_size(with_added_tokens=True)
    return DONE, json.dumps([size, {name: backend.token_to_id(name) for name in names}, added])


_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> Reply:
    """Tokenise a text; reply with the bytes of a (3, tokens) int32 array: ids, begins, ends. Begin and end are indices
    of characters, the end exclusive, as in IsolatedEncoding."""
    encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    numbers = array("i", encoding.ids)
    for side in (0, 1):
        numbers.extend(place[side] for place in encoding.offsets)
    return DONE, numbers.tobytes()


def _decode(backend: tokenizers.Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> Reply:
    text = backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
    if len(text) <= 4 * MAX_CHARACTERS:
        return DONE, text
    return (
        REFUSED,
        f"the text of {len(token_ids):,} tokens has {len(text):,} characters; at most {4 * MAX_CHARACTERS:,}",
    )
