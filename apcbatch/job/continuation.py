"""Make the last line on stderr: the command that continues a run, or the sentence that nothing is left to do.

Invariant: run in the same folder and environment, the command gives the same configuration, plus --resume. Secrets are
left out, for the user to put back.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence

from apcbatch.address import shown_address
from apcbatch.config import ENV_PREFIX, OPTIONS, Config, flag_name
from apcbatch.option_values import FILE_MARK, format_size, shown

ERROR_MARK = '"error":{'  # found only in error records: quotes inside texts are escaped
REPLACED = ("resume", "overwrite", "retry_errors")


def command_line(words: Sequence[str]) -> str:
    """Join words to a shell command, each quoted as needed."""
    return " ".join(map(_quoted, words))


def command_words(
    program: Sequence[str],
    inputs: Sequence[str],
    output: str,
    config_file: str | None,
    config: Config,
    added: Sequence[str],
) -> list[str]:
    """Return the command's words before quoting: every option that a flag or a variable gave, then the `added` flags.
    Secrets in an address are left out, for the user to put back."""
    words = [*program, "run", *map(shown_address, map(_operand, inputs)), "-o", shown_address(output)]
    if config_file:
        words += ["--config", config_file]
    for name in OPTIONS:
        if name not in REPLACED and config.origins.get(name, "").startswith(("--", ENV_PREFIX)):
            words += _flag(name, config)
    return [*words, *added]


def _operand(name: str) -> str:
    """Return the name of a file so that no command takes it for an option."""
    return f"./{name}" if name.startswith("-") and name != "-" else name


def _quoted(word: str) -> str:
    """Quote a word for the shell, on one line. A word with a newline, another unprintable character or a byte that is
    not UTF-8 becomes `$'...'`, which not every shell knows."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, word)).replace("'", "\\'") + "'"


def _escaped(character: str) -> str:
    if character in "\n\r\t\\":
        return character.encode("unicode_escape").decode()
    return character if character.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _flag(name: str, config: Config) -> Iterator[str]:
    spec, value = OPTIONS[name], getattr(config, name)
    flag = flag_name(name)
    if name == "store" and value is None:
        yield "--no-store"
    elif value is False and spec.opposite is not None:
        yield spec.opposite
    elif spec.flag is None or (value is None and not spec.has_auto) or value is False:
        return
    elif value is True:
        yield flag
    elif spec.most is not None:
        for one in value:
            yield from (flag, str(one))
    elif shown(spec, value) is None:
        if config.origins[name] == flag:  # a secret, for the user to put into FILE; one from a variable is still set
            yield from (flag, f"{FILE_MARK}FILE")
    else:
        yield from (flag, format_size(value) if spec.kind == "size" else str(shown(spec, value)))


def nothing_left(output: str, errors_by_code: Mapping[str, int]) -> str:
    """Return the last line of a run whose error records would all come again. errors_by_code: number of this run's
    error records by code; empty if an earlier run wrote them all."""
    kinds = ", ".join(f"{count} {code}" for code, count in sorted(errors_by_code.items()))
    which = f"the error records ({kinds})" if kinds else "the error records of earlier runs"
    grep = {".gz": "zgrep", ".zst": "zstdgrep"}.get(os.path.splitext(output)[1], "grep")
    find = command_line([grep, ERROR_MARK, _operand(output)])
    where = "the output has them" if output == "-" else f"to see them: {find}"
    return f"nothing is left to do: {which} would come again, until their lines in INPUT are corrected; {where}"
