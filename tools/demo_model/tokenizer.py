"""The demo tokenizer: byte-level BPE with a vocabulary of 4,096, trained on text of this repository's own.

The 256 bytes are in the vocabulary, so every text comes back as it was. Control tokens take the first ids;
the tags around a tool call are single tokens that survive decoding, because the answer is parsed for them.
Must not know: weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TAGS = ("<tool_call>", "</tool_call>", "<tools>", "</tools>")
CONTROL = (PAD, BOS, END, *ROLES, *TAGS)
BYTES = 256
LONGEST_TOKEN = 16  # characters; keeps rulers and indentation from filling the vocabulary
MAX_TOKENS = 32768

# Words with their leading space, digits in threes from the left, punctuation, line ends, indentation.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of VOCAB_SIZE entries: CONTROL, the 256 bytes, then merges learnt from texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"expected a vocabulary of {VOCAB_SIZE}, got {tokenizer.get_vocab_size()}: the training text is "
            "too short, so give it more"
        )
    return tokenizer


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of tokenizer.json, with the tags marked as text that decoding keeps."""
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    return document


def tokenizer_config() -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    return {
        "add_prefix_space": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": MAX_TOKENS,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
