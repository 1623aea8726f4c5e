"""The command that continues a run, word by word, and the sentence where there is none."""

from __future__ import annotations

import subprocess
from typing import Any

from apcbatch.config import Config
from apcbatch.job.continuation import command_line, command_words, nothing_left


def test_each_word_is_one_for_the_shell() -> None:
    """Fault: a name with a line end or an escape is two words, another name, or acts on the terminal."""
    for word, quoted in [
        ("plain", "plain"),
        ("two words", "'two words'"),
        ("it's", "'it'\"'\"'s'"),
        ("a\nb", "$'a\\nb'"),
        ("\n\n", "$'\\n\\n'"),
        ("a\tb\r\\it's", "$'a\\tb\\r\\\\it\\'s'"),
        ("\x1b[2J", "$'\\x1b[2J'"),
        ("\udcff", "$'\\xff'"),
        ("é\u202e", "$'é\\xe2\\x80\\xae'"),
    ]:
        assert command_line(["x", word]) == f"x {quoted}"
        told = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True).stdout
        assert told == word.encode("utf-8", "surrogateescape")


def test_each_option_is_given_again() -> None:
    """Fault: the run continues with another value, or with one that was not given."""

    def command(name: str, value: Any, origin: str) -> list[str]:
        config = Config(**{name: value}, origins={name: origin})
        return command_words(["apcbatch"], ["in"], "out", None, config, ["--resume"])

    before, after = ["apcbatch", "run", "in", "-o", "out"], ["--resume"]
    rows: list[tuple[str, Any, list[str]]] = [
        ("seed", 5, ["--seed", "5"]),
        ("seed", 0, ["--seed", "0"]),
        ("pool_size", 1 << 20, ["--pool-size", "1MiB"]),
        ("stop", ("a", "b c"), ["--stop", "a", "--stop", "b c"]),
        ("stop_token_id", (3, 4), ["--stop-token-id", "3", "--stop-token-id", "4"]),
        ("logprobs", True, ["--logprobs"]),
        ("logprobs", False, []),
        ("exact", True, ["--exact"]),
        ("exact", False, ["--fast"]),
        ("store", None, ["--no-store"]),
        ("limit", None, []),
        ("store", "s", ["--store", "s"]),
        ("cache_salt", "secret", ["--cache-salt", "@FILE"]),
        ("cache_salt", "@salt", ["--cache-salt", "@salt"]),
    ]
    for name, value, words in rows:
        assert command(name, value, "--" + name.replace("_", "-")) == [*before, *words, *after]
        assert command(name, value, "default") == command(name, value, "c.yaml") == [*before, *after]
        is_still_set = words[1:] == ["@FILE"]
        assert command(name, value, "APCBATCH_X") == [*before, *([] if is_still_set else words), *after]


def test_inputs_are_no_options_and_secrets_are_left_out() -> None:
    """Fault: an INPUT called -x.jsonl is an option, or a password is printed."""
    inputs = ["-", "-x.jsonl", "memory://user:hush@host/x"]
    words = command_words(["apcbatch"], inputs, "memory://user:hush@host/o", "c.yaml", Config(), [])
    assert words == [
        "apcbatch", "run", "-", "./-x.jsonl", "memory://host/x", "-o", "memory://host/o", "--config", "c.yaml",
    ]  # fmt: skip


def test_what_is_left_where_nothing_is_to_do() -> None:
    """Fault: the errors are looked for with a program that does not unpack them, in an option, or counted
    wrong."""
    for output, where in [
        ("-", "the output has them"),
        ("o.jsonl", "to see them: grep '\"error\":{' o.jsonl"),
        ("o.gz", "to see them: zgrep '\"error\":{' o.gz"),
        ("my o.zst", "to see them: zstdgrep '\"error\":{' 'my o.zst'"),
        ("+o", "to see them: grep '\"error\":{' +o"),
        ("-o", "to see them: grep '\"error\":{' ./-o"),
    ]:
        assert nothing_left(output, {"b": 2, "a": 1}) == (
            "nothing is left to do: the error records (1 a, 2 b) would come again, until their lines in INPUT are "
            f"corrected; {where}"
        )
        assert "do: the error records of earlier runs would come again" in nothing_left(output, {})
