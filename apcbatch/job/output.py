"""Make OUT, under the name that the user gave, from a local file of plain lines.

A run appends plain lines to a local file, which is OUT itself in most cases. An OUT that ends in `.gz` or `.zst` is
compressed from `OUT.part` when the run ends; an OUT with an address is uploaded then. So a kill, a power cut or a
refused upload leaves a local file, from which --resume continues.

Invariants: the plain lines are removed only after the compressed file is safe; the local file of an uploaded OUT stays;
a file that appears under OUT's name during the run is not replaced.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from apcbatch.address import (
    is_address,
    is_stream,
    last_part,
    open_filesystem,
    output_place,
    read_head,
    reason_of,
    shown_address,
)
from apcbatch.config import Config
from apcbatch.data.input.files import BROKEN, Stream, open_stream, reason
from apcbatch.data.input.inputs import RUN_FILE_SUFFIX
from apcbatch.errors import StoppedError, UsageError
from apcbatch.job.disk import replacing
from apcbatch.job.runfile import MAX_BYTES, MISSING, NOT_ONE, is_run_file, read_run_file
from apcbatch.job.sink import ID, FileSink
from apcbatch.regular_files import identity

PART_SUFFIX = ".part"
CHUNK_BYTES = 1 << 20
_PACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.compressobj(wbits=31),
    ".zst": lambda: zstandard.ZstdCompressor().compressobj(),
}
_OTHER_PACKINGS = (".bz2", ".xz")


@dataclass
class Output:
    """Places of one OUT. name: the place of OUT, a path or an address. target: the finished local file. lines: the
    local file that lines are appended to. packing: `.gz`, `.zst`, or empty for no compression."""

    name: str
    target: str
    lines: str
    packing: str
    uploaded_run_file: bytes | None = field(default=None, init=False)  # run file at the address before this run
    is_uploaded: bool = field(default=False, init=False)  # the address had an OUT before this run

    def __post_init__(self) -> None:
        self._before = identity(self.target)

    @property
    def shown(self) -> str:
        """The name without the secrets of its address."""
        return shown_address(self.name)

    @property
    def is_remote(self) -> bool:
        """Whether OUT has an address."""
        return is_address(self.name)

    @property
    def is_built_at_the_end(self) -> bool:
        """Whether OUT is made when the run ends, from another file that lines are appended to."""
        return self.is_remote or bool(self.packing)

    @property
    def has_other_target(self) -> bool:
        """Whether the finished file is another one than when the command began."""
        return identity(self.target) != self._before

    def exists(self) -> bool:
        """Return whether this machine has a file that a fresh run would replace."""
        return os.path.exists(self.target) or os.path.exists(self.lines)

    def check_address(self, config: Config) -> None:
        """Look for an OUT and a run file at OUT's address, and remember both; UsageError if this run may not replace
        them."""
        head = read_head(self.name, CHUNK_BYTES)
        data = self.uploaded_run_file = read_head(self.name, MAX_BYTES, RUN_FILE_SUFFIX)
        self.is_uploaded = head is not None
        if data is not None and not is_run_file(data):
            raise _other_file(f"{self.shown}{RUN_FILE_SUFFIX} {NOT_ONE}")
        if config.overwrite or (head is None and data is None):
            return
        if not config.resume:
            there = self.shown if head is not None else self.shown + RUN_FILE_SUFFIX
            raise UsageError(f"output {there} exists; give --resume to continue it or --overwrite to replace it")
        if head is None:
            return
        if not (_has_bytes(self.target) or _has_bytes(self.lines)):
            raise UsageError(
                f"--resume continues from {self.target} and {self.target}{RUN_FILE_SUFFIX} in this folder, which are "
                f"not here; copy {self.shown} and its run file there, or --overwrite"
            )
        if not _is_out(Stream(io.BytesIO(head))):
            raise UsageError(f"{self.shown} is not an OUT of this program; move it away, or --overwrite")

    def unpack(self, sink: FileSink) -> None:
        """Fill the sink with the lines of the compressed OUT, unless it has lines of its own. UsageError if OUT is
        damaged, or was not written by this program."""
        if not self.packing or not os.path.isfile(self.target):
            return
        if sink.has_lines():
            with open_stream(self.target) as stream:
                if _is_out(stream):
                    return
            raise UsageError(
                f"{self.target} is not an OUT of this program, and the answers for it are in {self.lines}; move it "
                "away, or --overwrite"
            )
        try:
            with open_stream(self.target) as stream:
                sink.fill(stream.chunks())
        except BROKEN as error:
            raise UsageError(
                f"output {self.target} cannot be unpacked: {reason(error)}; put the whole file there, or --overwrite"
            ) from None

    def upload(self, local: str, suffix: str = "") -> None:
        """Copy a local file to OUT's address with the suffix appended; StoppedError if that fails."""
        system, path = open_filesystem(self.name)
        try:
            system.put_file(local, path + suffix)
        except Exception as error:  # the package of the address may raise anything
            sentence = f"{self.shown}{suffix} cannot be written: {reason_of(error, self.name)}"
            raise StoppedError(sentence) from None

    def finish(self, sink: FileSink) -> None:
        """Compress and upload OUT, as its name requires, from complete, synced lines. StoppedError if that fails; the
        answers then stay in a local file."""
        if self.packing and self.has_other_target:
            raise StoppedError(
                f"output {self.target} appeared or was changed while this run went on, and is not replaced; the "
                f"answers are in {self.lines}: move {self.target} away and give --resume"
            )
        if self.packing:
            try:
                with replacing(self.target, sink.disk) as fd:
                    for piece in packed(_chunks(self.lines), self.packing):
                        sink.disk.write(fd, piece)
                sink.disk.unlink(self.lines)
            except OSError as error:
                raise StoppedError(
                    f"output {self.target} cannot be written: {error.strerror}; the answers are in {self.lines}"
                ) from None
        if self.is_remote:
            try:
                if not self.is_uploaded and read_head(self.name, 1) is not None:
                    raise StoppedError(f"{self.shown} appeared while this run went on, and is not replaced")
                self.upload(self.target)
            except (StoppedError, UsageError) as error:
                raise StoppedError(
                    f"{error}; the answers are safe in {self.target} on this machine: the same command with --resume "
                    "uploads them, or copy that file"
                ) from None


def output_for(name: str) -> Output:
    """Return the Output at a place; UsageError for a suffix such as `.xz`, or a local file that cannot be written."""
    target = output_place(last_part(name)) if is_address(name) else name
    suffix = os.path.splitext(target)[1].lower()
    if is_stream(target):
        target = os.path.realpath(target) if os.path.isfile(target) else target  # behind a descriptor
        return Output(name, target, target, "")
    if suffix in _OTHER_PACKINGS:
        raise UsageError(
            f"output {shown_address(name)} would not be packed; give a name in .gz or .zst, or a plain one"
        )
    if suffix not in _PACKERS:
        return Output(name, target, target, "")
    return Output(name, target, output_place(os.path.realpath(target) + PART_SUFFIX), suffix)


def _has_bytes(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) > 0


def check_out(path: str) -> None:
    """Raise UsageError if a run would replace a file that is no OUT of this program."""
    if os.path.isfile(path):
        with open_stream(path) as stream:
            if not _is_out(stream):
                raise _other_file(f"{path} has no answers of this program")


def check_run_file(path: str | Path) -> None:
    """Raise UsageError if a run would replace a file that is no run file of this program, or that cannot be read."""
    facts, fault = read_run_file(path)
    if facts is None and fault != MISSING:
        raise _other_file(f"{path} {fault}")


def _other_file(what: str) -> UsageError:
    ways = "move it away, or choose another -o (--overwrite replaces OUT alone)"
    return UsageError(f"{what}, and would be replaced; {ways}")


def _is_out(stream: Stream) -> bool:
    """Return whether the content is empty or begins like a line of OUT."""
    try:
        head = next(stream.chunks(), b"")
    except BROKEN:
        return False
    return not head or ID.match(head) is not None


def _chunks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from iter(lambda: file.read(CHUNK_BYTES), b"")


def packed(chunks: Iterable[bytes], packing: str) -> Iterator[bytes]:
    """Yield the chunks compressed, piece by piece; as they are with an empty `packing`."""
    if not packing:
        yield from chunks
        return
    packer = _PACKERS[packing]()
    yield from map(packer.compress, chunks)
    yield packer.flush()
