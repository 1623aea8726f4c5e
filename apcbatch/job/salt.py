"""The cache salt: the secret itself, from the option's text or from the file that it names.

Must not know: what the salt is for. The salt is never written anywhere.
"""

from __future__ import annotations

from apcbatch.config import Config
from apcbatch.errors import UsageError
from apcbatch.values import FILE_MARK

MAX_BYTES = 4096


def read_salt(config: Config) -> str | None:
    """The salt of a run, without the line end of its file; None if none is given. UsageError if the file holds no salt."""
    given = config.cache_salt
    if given is None or not given.startswith(FILE_MARK):
        return given
    path = given.removeprefix(FILE_MARK)
    where = f"{config.origins['cache_salt']}: the file {path}"
    try:
        with open(path, "rb") as file:
            salt = file.read(MAX_BYTES + 1).rstrip(b"\r\n").decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"{where} cannot be read as UTF-8 text ({error}); give @ and the file with the salt") from None
    if not 1 <= len(salt.encode()) <= MAX_BYTES:
        raise UsageError(f"{where} holds no salt of 1 to {MAX_BYTES} bytes; put one line of random text into it")
    return salt
