"""Addresses such as `s3://bucket/chats.jsonl`: what fsspec opens, and what of an address may be shown.

Must not know: what is behind an address. Invariants: an address comes from the command line, never from data; what is
shown of one has neither user names, passwords nor the signed part of a query.
"""

from __future__ import annotations

import os
import re
from typing import Any, NoReturn
from urllib.parse import urlsplit

from apcbatch.errors import UsageError

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_SECRET = re.compile(r"(?<=://)[^/@\s]*@|\?\S*")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}


def is_address(name: str) -> bool:
    """Whether a name begins with a protocol, such as `s3://`."""
    return _ADDRESS.match(name) is not None


def shown_address(name: str) -> str:
    """The address without user, password and query; any other name as it is."""
    return _SECRET.sub("", name) if is_address(name) else name


def last_part(name: str) -> str:
    """The file name in a path or in an address: `chats.jsonl`; empty if there is none."""
    path = urlsplit(shown_address(name)).path if is_address(name) else name
    return os.path.basename(path.rstrip("/"))


def open_filesystem(name: str) -> tuple[Any, str]:
    """The file system of an address and the path in it; UsageError if the package for it is missing."""
    from fsspec import core

    protocol = name.partition("://")[0].rpartition("::")[2].lower()
    try:
        url_to_fs: Any = core.url_to_fs
        system, path = url_to_fs(name)
    except ImportError:
        package = _PACKAGES.get(protocol, _named_package(protocol))
        raise UsageError(f"{shown_address(name)} needs the package {package}; pip install {package}") from None
    except Exception as error:  # a protocol's own package may raise anything
        refuse(name, "opened", error)
    return system, str(path)


def refuse(name: str, done: str, error: BaseException) -> NoReturn:
    """Raise UsageError: the address cannot be `done`, for this reason."""
    raise UsageError(f"{shown_address(name)} cannot be {done}: {reason_of(error, name)}") from None


def reason_of(error: BaseException, name: str) -> str:
    """The first line of what a file system says, without what is secret in the address."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = text.replace(name, shown_address(name)).strip().splitlines()
    return _SECRET.sub("", lines[0]).rstrip(".")[:300] if lines else type(error).__name__


def _named_package(protocol: str) -> str:
    """The package that fsspec asks for."""
    from fsspec.registry import known_implementations

    known: dict[str, Any] = known_implementations.get(protocol, {})
    found = re.search(r"[Ii]nstall ([a-z0-9_-]+) ", known.get("err", ""))
    return found[1] if found and found[1] != "the" else f"fsspec[{protocol}]"
