"""The configuration file: any content ends in values or in a sentence, in bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest

from apcbatch import config, resolution
from apcbatch.cli.program import main
from apcbatch.config import OPTIONS
from apcbatch.errors import UsageError
from tests.effort import table


def load(tmp_path: Path, text: str | bytes) -> config.Config:
    """The configuration that a file gives alone."""
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return resolution.load({}, str(path), {})


def test_both_spellings_of_a_key_are_read(tmp_path: Path) -> None:
    """Catches a dash in a key, or a byte order mark, that makes it unknown."""
    assert load(tmp_path, b"\xef\xbb\xbfmax-running: 4\nblock_size: 16\n").max_running == 4
    assert load(tmp_path, "").max_running == 32


BOMBS = {
    "model: " + "[" * 200_000: "nested deeper than 16 levels",
    "model: " + "{a: " * 5_000: "nested deeper than 16 levels",
    "a: &a [x, x]\nb: &b [*a, *a]\nmodel: [*b, *b]": "line 2: an alias is not read; write the value out",
    "seed: " + "9" * 5_000: "cannot be read: Exceeds the limit",
    "seed: 0x" + "f" * 5_000: "seed is a number of 20000 bits; expected an integer from 0 up to 9223372036854775807",
    "block_size: 99999999999999999999": "expected an integer from 1 up to 2147483647",
    "window_tokens: 1.0e+300": r"window_tokens is 1e\+300; expected an integer",
    "max_running: 100000000000": "expected an integer from 1 up to 65536",
    "max_batch_tokens: 1000000000000": "expected an integer from 1 up to 2147483647",
    "max_tokens: 10000000000": "expected an integer from 1 up to 2147483647",
    "min_gain_tokens: 10000000000": "expected auto or an integer from 1 up to 2147483647",
    "limit: 9223372036854775808": "expected an integer from 0 up to 2147483647",
    "store_size: 99999999TiB": "expected a size such as 20GiB or 512MiB, up to 1048576TiB",
    "pool_size: " + "9" * 4_000: "expected a size such as",
    "temperature: .inf": "expected a number from 0",
    'model: "a\\0b"': r"model is 'a\\x00b'; expected a text that is not empty, in Unicode and without NUL",
    'store: "\\ud800"': "store is .*; expected a text that is not empty, in Unicode",
    "model: [a, b]": "model is a list; expected a text",
    "logprobs: {a: b}": "logprobs is a mapping; expected true or false",
    "logprobs: 0x" + "f" * 5_000: "logprobs is a number of 20000 bits; expected true or false",
    "model: 2024-13-45": "cannot be read: month must be in 1..12",
    "seed: 1\nseed: 2": "has 'seed' twice; expected each option once",
    "max-running: 1\nmax_running: 2": "has 'max_running' twice; expected each option once",
    "x" * 900 + ": 1": "x is not an option$",
    "0x" + "f" * 200 + ": 1": "a number of 800 bits is not an option",
    "[a, b]: 1": "is not YAML",
    "- a\n- a": "holds a list; expected `option: value` lines",
    "a: b: c": "is not YAML",
    b"model: \xff\xfe": "cannot be read: 'utf-8' codec",
    b"model: a\x00b": "is not YAML",
    b"#" * ((1 << 20) + 1): "holds more than 1,048,576 bytes",
    "!!python/object/apply:os.system ['true']": "is not YAML",
    "a: !!set {b}": "a is not an option",
}  # fmt: skip


@table("text, sentence", BOMBS.items())
def test_what_a_file_may_hold_ends_in_a_sentence(tmp_path: Path, text: str | bytes, sentence: str) -> None:
    """Catches deep nesting, numbers beyond 64 bits, NUL, huge values, aliases and duplicates: internal errors, values
    that ended in a MemoryError later, and a second value that silently won."""
    with pytest.raises(UsageError, match=sentence) as caught:
        load(tmp_path, text)
    assert len(str(caught.value)) < 1_000


def test_the_same_values_are_refused_in_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a bound that holds for one source alone."""
    for name, value in (("WINDOW_TOKENS", "9" * 5_000), ("MAX_RUNNING", "1e9"), ("POOL_SIZE", "9" * 31)):
        with pytest.raises(UsageError, match=rf"APCBATCH_{name} is '[19]+.*; expected "):
            resolution.load({}, None, {f"APCBATCH_{name}": value})
    assert main(["plan", "x.jsonl", "--block-sizes", "1,99999999999"]) == 2
    assert main(["tune-block-size", "x.jsonl", "--candidates", "9" * 5_000]) == 2
    assert "internal" not in capsys.readouterr().err


def test_every_number_has_a_bound() -> None:
    """Catches a new option whose huge value reaches an allocation."""
    unbounded = {
        name for name, spec in OPTIONS.items() if spec.kind in ("integer", "size", "number") and spec.maximum is None
    }
    assert not unbounded


def test_a_pipe_is_read(tmp_path: Path) -> None:
    """Catches `--config <(make-config)` being refused."""
    import os

    reader, writer = os.pipe()
    os.write(writer, b"seed: 5\n")
    os.close(writer)
    assert resolution.load({}, f"/dev/fd/{reader}", {}).seed == 5
    os.close(reader)
