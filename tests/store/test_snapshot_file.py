"""The bytes of one snapshot: what is written, and that nothing else is ever read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from apcbatch.layout import TensorLayout
from apcbatch.store.format import MAX_HEADER_BYTES, BadSnapshot, Header, TensorInfo, make_header, read_header
from apcbatch.store.snapshot_file import _bytes_of, check_layout, decode, encode, read_tensors
from tests.effort import table
from tests.store.conftest import FINGERPRINT, key_of

GOLDEN = Path(__file__).parent / "golden" / "snapshot-v1.safetensors"


class MemoryReader:
    """A FileReader over bytes; `largest_read` is the most that was asked for at once."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)
        self.largest_read = 0

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self.largest_read = max(self.largest_read, len(buffer))
        return io.BytesIO(self.data[offset:]).readinto(buffer)


def small_snapshot() -> tuple[Header, dict[str, np.ndarray]]:
    """The snapshot of the golden file."""
    arrays = {
        "ssm": np.arange(12, dtype=np.float32).reshape(1, 4, 3) / 8,
        "conv": np.arange(9, dtype=np.uint16).reshape(1, 3, 3),
        "kv": np.arange(32, dtype=np.uint16).reshape(1, 2, 8, 1, 2),
    }
    return make_header(b"\x11" * 32, b"\x22" * 32, 24, (b"\x33" * 32, 16), arrays), arrays


def file_bytes(header: Header, arrays: dict[str, np.ndarray]) -> bytes:
    return b"".join(bytes(chunk) for chunk in encode(header, arrays)[1])


def read(data: bytes) -> tuple[Header, dict[str, np.ndarray]]:
    reader = MemoryReader(data)
    header = read_header(reader)
    return header, read_tensors(reader, header)


def forged(change: dict[str, object] | bytes, data: bytes = b"", metadata: dict[str, object] | None = None) -> bytes:
    """A file with a header of our own making under a checksum that is right."""
    header, _ = small_snapshot()
    if isinstance(change, bytes):
        text = change
    else:
        document = orjson.loads(header.encode()[8:])
        document["__metadata__"].update(metadata or {})
        document.update(change)
        text = orjson.dumps({name: value for name, value in document.items() if value is not None})
    text += b" " * (-(8 + len(text)) % 64)
    raw = bytearray(len(text).to_bytes(8, "little") + text)
    begin = raw.find(b'"checksum":"') + len(b'"checksum":"')
    raw[begin : begin + 32] = b"0" * 32
    raw[begin : begin + 32] = xxhash.xxh3_128_hexdigest(raw).encode()
    return bytes(raw) + data


def test_the_golden_file_is_what_is_written_and_read() -> None:
    """A change of the bytes without a new FORMAT_VERSION would make every store on somebody's disk unreadable; a
    bfloat16 tensor written as uint16 would be misread by every other tool."""
    data = GOLDEN.read_bytes()
    expected_header, expected = small_snapshot()
    assert file_bytes(expected_header, expected) == data
    header, arrays = read(data)
    assert (header.key, header.position) == (expected_header.key, expected_header.position)
    assert (header.parent, header.parent_position) == (expected_header.parent, 16)
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes() and arrays[name].shape == array.shape
    tensors = dict(safetensors.deserialize(data))
    assert {name: tensor["dtype"] for name, tensor in tensors.items()} == {"ssm": "F32", "conv": "BF16", "kv": "BF16"}
    assert bytes(tensors["kv"]["data"]) == expected["kv"].tobytes()


@settings(deadline=None)
@given(
    position=st.integers(2, 1 << 40),
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from([np.float32, np.float16, np.uint16]),
    has_parent=st.booleans(),
)
def test_round_trip(position: int, shape: list[int], dtype: type, has_parent: bool) -> None:
    """Any shape, empty ones and scalars included, comes back bit for bit, NaNs too."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    noise = np.random.default_rng(position).bytes(num_bytes)
    arrays = {"a": np.frombuffer(noise, dtype).reshape(shape), "b_2": np.zeros(3, np.float32)}
    parent = (key_of("parent", 1), position - 1) if has_parent else None
    header = make_header(key_of("x", position), FINGERPRINT, position, parent, arrays)
    read_back, found = read(file_bytes(header, arrays))
    assert (read_back.position, read_back.parent, read_back.fingerprint) == (position, header.parent, FINGERPRINT)
    for name, expected in arrays.items():
        assert found[name].tobytes() == expected.tobytes() and found[name].shape == expected.shape


MOST = {f"{number:x}".rjust(32, "n"): np.full([1] * 7 + [2], number, np.float16) for number in range(16)}
LARGEST = (TensorInfo("a", "F32", (1 << 34,)), TensorInfo("b", "F16", (1 << 36, 0)))


def test_the_most_that_the_format_holds_is_read_back() -> None:
    """Catches a bound that refuses its own value, and a header that is longer than the first read."""
    for fingerprint, position, parent in ((b"f" * 64, 1 << 40, (b"p" * 32, (1 << 40) - 1)), (b"f", 1, None)):
        header = make_header(b"k" * 32, fingerprint, position, parent, MOST)
        data = file_bytes(header, MOST)
        read_back, arrays = read(data)
        assert len(data) > 2048 and (read_back.fingerprint, read_back.position) == (fingerprint, position)
        assert all(np.array_equal(arrays[name], MOST[name]) for name in MOST)
    assert make_header(b"k" * 32, b"f", 1, None, LARGEST).tensors == LARGEST


@table("change, reason", [
    ({"key": b"k" * 33}, "a key has 32 bytes"),
    ({"parent": (b"p" * 31, 1)}, "a key has 32 bytes"),
    ({"fingerprint": b"f" * 65}, "a fingerprint has 1 to 64 bytes, this one 65"),
    ({"position": (1 << 40) + 1}, "position 1099511627777 does not follow"),
    ({"position": 5, "parent": (b"p" * 32, 5)}, "position 5 does not follow its parent's, 5"),
    *(({"tensors": tensors}, reason) for tensors, reason in (
        ({**MOST, "z": np.zeros(1, np.float16)}, "holds 1 to 16 tensors, this one 17"),
        ({}, "1 to 16 tensors"),
        ({"n" * 33: np.zeros(1, np.float16)}, "a tensor's name is lower-case"),
        ({"SSM": np.zeros(1, np.float32)}, "lower-case"),
        ((TensorInfo("a", "F32", ((1 << 34) + 1,)),), "tensor a is too large"),
        ((TensorInfo("a", "F32", ((1 << 36) + 1, 0)),), "tensor a has an impossible shape"),
        ({"ssm": np.zeros(1, np.float64)}, "float64"),
        ({"ssm": np.zeros(1, ">f4")}, ">f4"),
        ({"ssm": np.zeros([1] * 9, np.float32)}, "9 dimensions"),
    )),
])  # fmt: skip
def test_one_more_than_the_format_holds_is_refused(change: dict[str, object], reason: str) -> None:
    """Catches a snapshot that is written and that no reader takes."""
    given = {"key": b"k" * 32, "fingerprint": b"f", "position": 9, "parent": None, "tensors": MOST} | change
    with pytest.raises(ValueError, match=reason):
        make_header(**given)


@table("asked, reason", [
    ({"key": b"j" * 32}, "it holds the snapshot 6b"), ({"key": b"l" * 32}, "it holds the snapshot 6b"),
    ({"position": 4}, "it holds the snapshot .* at 5"), ({"position": 6}, "it holds the snapshot .* at 5"),
    ({"fingerprint": b"e"}, "a model with another fingerprint"),
    ({"fingerprint": b"g"}, "a model with another fingerprint"),
    ({"layout": {"a": TensorLayout("F16", (1,))}}, "the model's snapshots hold"), ({}, None),
    ({"parent": (b"p" * 32, 4)}, "it continues a snapshot at 4; expected one that is whole"),
])  # fmt: skip
def test_bytes_from_another_process_are_the_snapshot_that_was_asked_for(asked: dict[str, Any], reason: str) -> None:
    """Catches the state of other tokens or of another model, which would be a wrong answer."""
    given = {"key": b"k" * 32, "position": 5, "fingerprint": b"f", "layout": {"a": TensorLayout("F16", (2,))}} | asked
    arrays = {"a": np.arange(2, dtype=np.float16)}
    data = file_bytes(make_header(b"k" * 32, b"f", 5, given.pop("parent", None), arrays), arrays)
    if reason is None:
        found = decode(data, **given)
        assert (found.key, found.position, found.parent, found.parent_position) == (b"k" * 32, 5, None, 0)
        assert np.array_equal(found.arrays["a"], arrays["a"])
    else:
        with pytest.raises(BadSnapshot, match=reason):
            decode(data, **given)


def test_slices_of_a_larger_array_are_written_in_their_order() -> None:
    """A snapshot is one slot of an arena; writing the arena's bytes from its beginning would store another
    slot."""
    arena = np.arange(4 * 6, dtype=np.float32).reshape(4, 6)
    arrays = {"ssm": arena[1:3, ::2]}
    header = make_header(key_of("x", 1), FINGERPRINT, 1, None, arrays)
    assert np.array_equal(read(file_bytes(header, arrays))[1]["ssm"], arrays["ssm"])


def test_a_cut_or_a_flip_of_every_byte_is_refused() -> None:
    """A file cut by a power cut must never be read as a shorter snapshot, nor one with bytes after its end; every byte
    is under a checksum, padding and the checksums themselves included."""
    data = bytearray(file_bytes(*small_snapshot()))
    for index in range(len(data)):
        with pytest.raises(BadSnapshot):
            read(bytes(data[:index]))
        for mask in (0x01, 0x80, 0xFF):
            data[index] ^= mask
            with pytest.raises(BadSnapshot):
                read(bytes(data))
            data[index] ^= mask
    with pytest.raises(BadSnapshot, match="promises"):
        read(bytes(data) + b"\0")


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_noise_is_refused(data: bytes) -> None:
    """The parser must stand alone: a program that can write a file can also compute its checksum."""
    for noise in (data, forged(b'{"__metadata__":{"checksum":"' + b"0" * 32 + b'"' + data)):
        with pytest.raises(BadSnapshot):
            read(noise)


@table("claimed, reason", [
    *((claimed, ".") for claimed in (0, 1, 60, 1 << 40, (1 << 64) - 1)),
    (MAX_HEADER_BYTES, "the checksum of its header"), (MAX_HEADER_BYTES + 1, "its header claims 16,385 bytes"),
])  # fmt: skip
def test_a_header_length_that_lies_is_refused_before_it_is_read(claimed: int, reason: str) -> None:
    """A length of 2^64 - 1 must not become an allocation; a header of just the most bytes is read, one more is not."""
    reader = MemoryReader(claimed.to_bytes(8, "little") + b"x" * 2 * MAX_HEADER_BYTES)
    with pytest.raises(BadSnapshot, match=reason):
        read_header(reader)
    assert reader.largest_read <= (4096 if claimed != MAX_HEADER_BYTES else MAX_HEADER_BYTES)


SSM = {"dtype": "F32", "shape": [1, 4, 3], "data_offsets": [0, 48]}

ATTACKS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "negative dimension": ({"ssm": {**SSM, "shape": [-1, 4, -3]}}, {}),
    "huge dimension": ({"ssm": {**SSM, "shape": [1 << 60, 4, 3]}}, {}),
    "product beyond every integer": ({"ssm": {**SSM, "shape": [1 << 36] * 8}}, {}),
    "product within bounds, file too short": ({"ssm": {**SSM, "shape": [1 << 30]}}, {}),
    "too many dimensions": ({"ssm": {**SSM, "shape": [1] * 9}}, {}),
    "float dimension": ({"ssm": {**SSM, "shape": [1.0, 4, 3]}}, {}),
    "boolean dimension": ({"ssm": {**SSM, "shape": [True, 4, 3]}}, {}),
    "shape is a word": ({"ssm": {**SSM, "shape": "12"}}, {}),
    "shape missing": ({"ssm": {"dtype": "F32", "data_offsets": [0, 48]}}, {}),
    "overlapping offsets": ({"conv": {"dtype": "BF16", "shape": [1, 3, 3], "data_offsets": [0, 18]}}, {}),
    "a hole between offsets": ({"conv": {"dtype": "BF16", "shape": [1, 3, 3], "data_offsets": [64, 82]}}, {}),
    "unknown dtype": ({"ssm": {**SSM, "dtype": "F64"}}, {}),
    "dtype is a list": ({"ssm": {**SSM, "dtype": ["F32"]}}, {}),
    "entry is a number": ({"ssm": 5}, {}),
    "surplus entry": ({"ssm": {**SSM, "extra": 1}}, {}),
    "tensor without a checksum": ({"zz": {"dtype": "BF16", "shape": [0], "data_offsets": [130, 130]}}, {}),
    "bad tensor name": ({"../x": SSM}, {"checksum:../x": "0" * 32}),
    "no tensors": ({"ssm": None, "conv": None, "kv": None}, {}),
    "metadata is a list": ({"__metadata__": [1]}, {}),
    "surplus metadata": ({}, {"author": "me"}),
    "newer format": ({}, {"format": "apcbatch snapshot 2"}),
    "short key": ({}, {"key": "11"}),
    "key is not hex": ({}, {"key": "zz" * 32}),
    "key in capitals": ({}, {"key": "AB" * 32}),
    "key is a number": ({}, {"key": 7}),
    "no fingerprint": ({}, {"fingerprint": ""}),
    "position zero": ({}, {"position": "0"}),
    "position negative": ({}, {"position": "-5"}),
    "position is huge": ({}, {"position": "9" * 5000}),
    "position with zeros": ({}, {"position": "024"}),
    "position in other digits": ({}, {"position": "\u0662\u0664"}),
    "position is a number": ({}, {"position": 24}),
    "parent after the snapshot": ({}, {"parent_position": "25"}),
    "parent without a position": ({}, {"parent_position": "0"}),
    "position without a parent": ({}, {"parent": ""}),
}


@table("name", ATTACKS)
def test_attacks_are_refused_before_memory_is_taken(name: str) -> None:
    """A forged header with a right checksum must not reach an allocation, and not another exception
    either."""
    change, metadata = ATTACKS[name]
    if "__metadata__" in change:
        text = b'{"__metadata__":{"checksum":"' + b"0" * 32 + b'"},"__metadata__":[1]}'
        data = forged(text)
    else:
        data = forged(change, bytes(130), metadata)
    reader = MemoryReader(data)
    with pytest.raises(BadSnapshot, match="its format is" if name == "newer format" else None):
        read_header(reader)  # not the tensors: their checksums do not match either
    assert reader.largest_read <= 16 * 1024


def test_the_unforged_header_passes() -> None:
    """The attacks above are refused for what they change, not for how they are made."""
    header, arrays = small_snapshot()
    data = file_bytes(header, arrays)
    length = 8 + int.from_bytes(data[:8], "little")
    checksums = {
        name: value
        for name, value in json.loads(data[8:length])["__metadata__"].items()
        if name.startswith("checksum:")
    }
    assert read(forged({}, data[length:], checksums))[0].position == 24


def test_another_spelling_of_the_same_header_is_refused() -> None:
    """One snapshot has one file: a second spelling would hide bytes from comparisons, and two readers may take
    different ones of two entries with one name."""
    header = small_snapshot()[0].encode()
    length = 8 + int.from_bytes(header[:8], "little")
    text = header[8:length].rstrip()
    spellings = [text.replace(b'"shape":', b'"shape":' + space) for space in (b"\n", b"\t", b" ")]
    for name in ("__metadata__", "ssm"):
        spellings.append(text[:-1] + b',"' + name.encode() + b'":' + orjson.dumps(orjson.loads(text)[name]) + b"}")
    for spelling in spellings:
        with pytest.raises(BadSnapshot, match="canonical"):
            read(forged(spelling, bytes(130)))


@table("arrays, layout", [
    ({"ssm": (1, 4, 3)}, {"ssm": TensorLayout("F32", (1, 4, 4))}),
    ({"ssm": (1, 4, 3)}, {"ssm": TensorLayout("BF16", (1, 4, 3))}),
    ({"ssm": (1, 4, 3), "kv": (7,)}, {"ssm": TensorLayout("F32", (1, 4, 3)), "kv": TensorLayout("F32", (None,))}),
    ({"ssm": (1, 4, 3)}, {"ssm": TensorLayout("F32", (1, 4, 3)), "conv": TensorLayout("F32", (1,))}),
    ({"ssm": (1, 4, 3)}, {}),
])  # fmt: skip
def test_another_layout_is_refused(arrays: dict[str, tuple[int, ...]], layout: dict[str, TensorLayout]) -> None:
    """A snapshot of another shape, dtype, number of tokens or of tensors that reached a kernel would be read beyond its
    end."""
    held = {name: np.zeros(shape, np.float32) for name, shape in arrays.items()}
    with pytest.raises(BadSnapshot, match="the model's snapshots hold"):
        check_layout(make_header(key_of("x", 8), FINGERPRINT, 8, None, held), layout)


@table(
    "given, is_used",
    [(np.zeros(4, np.uint8), True), (np.zeros((2, 1), np.uint16), True), (np.zeros(5, np.uint8), False),
     (np.zeros(8, np.uint8)[::2], False), (np.zeros((2, 2), np.uint8).T, False), (None, False)],
)  # fmt: skip
def test_a_tensor_is_read_into_what_holds_its_bytes(given: np.ndarray | None, is_used: bool) -> None:
    """Catches bytes that are written over others', or to a copy that is not read."""
    data = _bytes_of(given, 4)
    assert data.nbytes == 4 and data.dtype == np.uint8 and data.flags.c_contiguous
    assert (given is not None and np.shares_memory(data, given)) == is_used
