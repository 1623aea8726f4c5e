"""OUT as it is named, and the file of plain lines that it is made from.

Must not know: requests, what a line says. A run writes plain lines into a local file, which is OUT itself in most
cases. An OUT that ends in `.gz` or `.zst` is packed from `OUT.part` when the run ends, and one with an address is
uploaded then. So a kill, a power cut or a refused upload leaves what it leaves of a plain file, and --resume goes on.
Invariant: the plain lines go only after the packed file is safe; the local file of an uploaded OUT stays.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zstandard

from apcbatch.data.address import is_address, last_part, open_filesystem, reason_of, refuse, shown_address
from apcbatch.data.files import BROKEN, open_stream, reason
from apcbatch.errors import StoppedError, UsageError
from apcbatch.job.disk import STREAMS, replacing
from apcbatch.job.sink import FileSink

PART_SUFFIX = ".part"
CHUNK_BYTES = 1 << 20
_PACKERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.compressobj(wbits=31),
    ".zst": lambda: zstandard.ZstdCompressor().compressobj(),
}
_OTHER_PACKINGS = (".bz2", ".xz")


@dataclass(frozen=True)
class Output:
    """name: OUT as it was given, a path or an address. target: the finished local file. lines: the local file that
    lines are written to. packing: `.gz`, `.zst`, or empty for none."""

    name: str
    target: str
    lines: str
    packing: str

    @property
    def shown(self) -> str:
        """The name without what is secret in it."""
        return shown_address(self.name)

    @property
    def is_remote(self) -> bool:
        """Whether OUT has an address."""
        return is_address(self.name)

    @property
    def is_made_at_the_end(self) -> bool:
        """Whether OUT is another file than the one that lines go to."""
        return self.lines != self.name

    def exists(self) -> bool:
        """Whether there is something that a fresh run would replace. UsageError if an address cannot be asked."""
        if os.path.exists(self.target) or os.path.exists(self.lines):
            return True
        if not self.is_remote:
            return False
        system, path = open_filesystem(self.name)
        try:
            return bool(system.exists(path))
        except Exception as error:  # whatever its package raises
            refuse(self.name, "used", error)

    def unpack(self, sink: FileSink) -> None:
        """Give the sink the lines of the packed OUT, if it has none of its own; UsageError for a damaged one."""
        if not self.packing or sink.has_lines() or not os.path.isfile(self.target):
            return
        try:
            with open_stream(self.target) as stream:
                sink.fill(stream.chunks())
        except BROKEN as error:
            raise UsageError(
                f"output {self.target} cannot be unpacked: {reason(error)}; put the whole file there, or --overwrite"
            ) from None

    def upload(self, local: str, suffix: str = "") -> None:
        """Copy a local file to OUT's address with the suffix; StoppedError if it is refused."""
        system, path = open_filesystem(self.name)
        try:
            system.put_file(local, path + suffix)
        except Exception as error:  # whatever its package raises
            sentence = f"{self.shown}{suffix} cannot be written: {reason_of(error, self.name)}"
            raise StoppedError(sentence) from None

    def finish(self, sink: FileSink) -> None:
        """Make OUT from the lines, which are complete and safe. StoppedError if that fails; nothing is lost then."""
        if self.packing:
            try:
                with replacing(os.path.realpath(self.target), sink.disk) as fd:
                    for piece in _packed(self.lines, self.packing):
                        sink.disk.write(fd, piece)
                sink.disk.unlink(self.lines)
            except OSError as error:
                raise StoppedError(
                    f"output {self.target} cannot be written: {error.strerror}; the answers are in {self.lines}"
                ) from None
        if self.is_remote:
            try:
                self.upload(self.target)
            except StoppedError as error:
                raise StoppedError(
                    f"{error}; the answers are safe in {self.target} on this machine: the same command with --resume "
                    "uploads them, or copy that file"
                ) from None


def output_for(name: str) -> Output:
    """The Output for `-o NAME`; UsageError for a name that promises what is not written."""
    target = name
    if is_address(name):
        target = last_part(name)
        if not target:
            raise UsageError(f"{shown_address(name)} has no file name; give one, such as s3://bucket/answers.jsonl")
        if name.lower().startswith(("http://", "https://")):
            raise UsageError(f"{shown_address(name)} cannot be written to; give a file, or an address such as s3://")
    suffix = os.path.splitext(target)[1].lower()
    if target.startswith(STREAMS) or (os.path.exists(target) and not os.path.isfile(target)):
        return Output(name, target, target, "")
    if suffix in _OTHER_PACKINGS:
        raise UsageError(
            f"output {shown_address(name)} would not be packed; give a name in .gz or .zst, or a plain one"
        )
    if suffix not in _PACKERS:
        return Output(name, target, target, "")
    return Output(name, target, os.path.realpath(target) + PART_SUFFIX, suffix)


def _packed(path: str, packing: str) -> Iterator[bytes]:
    """The packed content of a file, piece by piece."""
    packer = _PACKERS[packing]()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
            yield packer.compress(chunk)
    yield packer.flush()
