"""Marker: says whether a folder is a store, so that nothing is done to one that is somebody else's.

Must not know: what a store does. A new store's first file is the marker, on the disk before anything else, so
a store is known as one whatever is lost of it later. A store made before there were markers is known by its
index, or by a snapshot file with a whole header. Looking changes nothing in the folder.
"""

from __future__ import annotations

import os
import re
from contextlib import closing, suppress
from itertools import islice
from typing import Literal

from apcbatch.errors import UsageError
from apcbatch.store.database import IndexFault
from apcbatch.store.files import Files
from apcbatch.store.format import FORMAT_VERSION, INDEX_NAME, MARKER, MARKER_NAME
from apcbatch.store.header import BadSnapshot
from apcbatch.store.index import Index
from apcbatch.store.objects import Objects

Found = Literal["store", "empty", "other"]

_ANY_MARKER = re.compile(rb"apcbatch snapshot store ([1-9][0-9]{0,4})\n")
_MAX_MARKER_BYTES = 64
_OBJECTS_LOOKED_AT = 64


def identify(files: Files, folder: str) -> Found:
    """What a folder is: a store, empty (a marker cut short counts as nothing), or something else.

    Raises UsageError for a store of a newer version, and OSError where that cannot be found out.
    """
    error: OSError | None = None
    try:
        marker = _read_marker(files, folder)
        if marker == MARKER:
            return "store"
        if match := _ANY_MARKER.fullmatch(marker or b""):
            refuse_newer(folder, int(match[1]))
        names = files.names(os.path.join(folder, ""))  # the slash: the folder itself may be a link
        if not names or (names == [MARKER_NAME] and marker is not None and MARKER.startswith(marker)):
            return "empty"
    except OSError as refusal:
        error = refusal
    if _has_index(files, folder) or _has_snapshot(files, folder):
        return "store"
    if error is not None:
        raise error
    return "other"


def put_marker(files: Files, folder: str) -> None:
    """Make a folder a store, for good before this returns."""
    with suppress(OSError):
        if _read_marker(files, folder) == MARKER:
            return
    files.write_durably(os.path.join(folder, MARKER_NAME), MARKER)


def _read_marker(files: Files, folder: str) -> bytes | None:
    """The marker's content, None where there is none."""
    path = os.path.join(folder, MARKER_NAME)
    if files.kind(path) != "file":
        return None
    with files.open(path) as reader:
        content = bytearray(min(reader.size, _MAX_MARKER_BYTES))
        return bytes(content[: reader.read_into(0, memoryview(content))])


def refuse_newer(path: str, version: int) -> None:
    """Raise UsageError for a format that this version does not know."""
    if version > FORMAT_VERSION:
        raise UsageError(
            f"{path} has the store format {version}, this version of apcbatch knows {FORMAT_VERSION}; use a "
            "newer apcbatch, or another --store folder"
        )


def _has_index(files: Files, folder: str) -> bool:
    """Whether there is an index of ours, sound or not. Opened as on a medium that nobody writes to, since
    anything else would make files beside it."""
    path = os.path.join(folder, INDEX_NAME)
    if files.kind(path) != "file":
        return False
    try:
        with closing(Index(path, "immutable")) as index:
            return index.has_our_tables()
    except IndexFault:
        return False


def _has_snapshot(files: Files, folder: str) -> bool:
    """Whether one of the first files that are named as snapshots are has a snapshot's header."""
    objects = Objects(files, folder)
    with suppress(OSError):
        for key in islice(objects.all_keys(), _OBJECTS_LOOKED_AT):
            with suppress(BadSnapshot, OSError):
                objects.header(key)
                return True
    return False
