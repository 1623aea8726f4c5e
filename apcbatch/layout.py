"""The layout of a model's state: its parts by layer and role, and every size and name derived from them.

The arena and its size, the plan's footprint, the tensors of a stored snapshot, the fingerprint and `Engine.snapshot`
derive from it, so the shape of a state is defined in one place. Invariant: all parts of one role have the same shape
and dtype, so that the layers of a role stack into one tensor.

Example: one Mamba layer of d_inner 4, d_state 2 and d_conv 3 in bfloat16. `ssm` (2, 4) float32 has 32 bytes, and `conv`
(2, 4) bfloat16 has 16. So a slot has 48 bytes, and a token adds none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

PAGE_TOKENS = 64
"""Tokens per page of per-token state."""

TOKEN_AXIS = "token"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "uint32": 4}
STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "uint32": "U32"}
_SHORT_DTYPES = {None: "", "float32": "f32", "uint32": "u32"}


class Extent(Enum):
    """How a part of the state at position p depends on the first p tokens."""

    AT = "at"
    """Value of a recurrence after exactly p tokens, always float32."""
    TAIL = "tail"
    """A fixed number of last inputs before p, oldest first; zeros stand for inputs before the first token."""
    TOKENS = "tokens"
    """One entry per token; tokens appended later do not change it."""


@dataclass(frozen=True)
class Role:
    """Common properties of all parts with one name.

    name: name of the tensor in a stored snapshot and in Engine.snapshot. axes: axes of one part in memory order; with
    Extent.TOKENS, exactly one of them is `token`. shown: the same axes in the order of Engine.snapshot; empty for
    memory order. dtype: None for the model's dtype.

    Raises ValueError if these contradict each other.
    """

    name: str
    extent: Extent
    axes: tuple[str, ...]
    shown: tuple[str, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        if (self.extent is Extent.TOKENS) != holds_tokens(self.name):
            raise ValueError(f"role {self.name}: exactly the names kv and kv_... are for what is kept for each token")
        if self.axes.count(TOKEN_AXIS) != (self.extent is Extent.TOKENS):
            raise ValueError(f"role {self.name} has the axes {self.axes}; expected one {TOKEN_AXIS} for tokens alone")
        if self.extent is Extent.AT and self.dtype != "float32":
            raise ValueError(f"role {self.name} is {self.dtype}; a recurrent value is float32")
        if self.shown and sorted(self.shown) != sorted(self.axes):
            raise ValueError(f"role {self.name} shows {self.shown}; expected an order of {self.axes}")

    def part(self, layer: int, shape: tuple[int | None, ...], model_dtype: str) -> StatePart:
        """Make a layer's part of this role. shape: sizes of the axes, None for the token axis."""
        return StatePart(layer, self, shape, self.dtype or model_dtype)

    @property
    def shown_order(self) -> list[int]:
        """Index in memory order of each axis in `shown` order."""
        return [self.axes.index(axis) for axis in self.shown or self.axes]

    @property
    def description(self) -> str:
        """Text of the role in the fingerprint."""
        return f"{self.name}(layer,{','.join(self.axes)}){_SHORT_DTYPES[self.dtype]}"


def holds_tokens(name: str) -> bool:
    """Return whether a tensor of this name has an entry per token. If stored, it holds the tokens since its parent
    only.

    The name decides, so that a store needs no model.
    """
    return name == "kv" or name.startswith("kv_")


SSM = Role("ssm", Extent.AT, ("d_state", "d_inner"), ("d_inner", "d_state"), "float32")
CONV = Role("conv", Extent.TAIL, ("d_conv-1", "d_inner"), ("d_inner", "d_conv-1"))
DELTA = Role(
    "delta",
    Extent.AT,
    ("v_head", "v_block", "d_key", "lane"),
    ("v_head", "d_key", "v_block", "lane"),
    "float32",
)
"""State S (d_key, d_value) of each value head, with the columns in v_block blocks of `lane` columns (`value_lanes`)."""
SSD = Role(
    "ssd",
    Extent.AT,
    ("head", "head_block", "d_state", "lane"),
    ("head", "head_block", "lane", "d_state"),
    "float32",
)
"""State of each Mamba-2 head, with the columns of the head in head_block blocks of `lane` columns (`value_lanes`)."""
KV = Role("kv", Extent.TOKENS, ("2", TOKEN_AXIS, "kv_head", "head_dim"))
"""Keys, then values."""


MOST_LANES = 64
_BLOCK_VALUES = 8192


def value_lanes(d_key: int, d_value: int) -> int:
    """Return how many columns one block of a matrix state (d_key, d_value) has: the largest divisor of d_value that is
    at most 64, and at most 8192 / d_key. Such a block is at most 32 KiB in float32 and stays in the L1 cache."""
    most = max(1, min(d_value, MOST_LANES, _BLOCK_VALUES // d_key))
    return next(lanes for lanes in range(most, 0, -1) if d_value % lanes == 0)


@dataclass(frozen=True)
class StatePart:
    """One part of one layer's state.

    layer: index over all layers of the model. shape: sizes of the role's axes, None for the token axis. dtype: torch's
    name. Raises ValueError for an unsupported shape or dtype.
    """

    layer: int
    role: Role
    shape: tuple[int | None, ...]
    dtype: str

    def __post_init__(self) -> None:
        pairs = zip(self.role.axes, self.shape, strict=False)
        fits = all((size is None) == (axis == TOKEN_AXIS) for axis, size in pairs)
        if len(self.shape) != len(self.role.axes) or not fits or self.dtype not in DTYPE_BYTES:
            raise ValueError(f"layer {self.layer} has {self.role.name} {self.shape} {self.dtype}, not {self.role.axes}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the part; with a token axis, bytes per token."""
        return math.prod(size for size in self.shape if size is not None) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Stack:
    """All parts of one role, ordered by layer. shape: shape of one part."""

    role: Role
    layers: tuple[int, ...]
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of a model's stored snapshots. dtype: safetensors name. shape: None stands for the tokens since the
    parent."""

    dtype: str
    shape: tuple[int | None, ...]


Layout = Mapping[str, TensorLayout]
"""The tensors of a stored snapshot, by name."""


@dataclass(frozen=True)
class StateLayout:
    """All parts of a model's state.

    Raises ValueError if two parts of a role differ in shape or dtype, or if a layer has a role twice.
    """

    parts: tuple[StatePart, ...]

    def __post_init__(self) -> None:
        first: dict[str, StatePart] = {}
        for part in self.parts:
            other = first.setdefault(part.role.name, part)
            if (part.role, part.shape, part.dtype) != (other.role, other.shape, other.dtype):
                raise ValueError(
                    f"{part.role.name} is {other.shape} {other.dtype} in layer {other.layer} and {part.shape} "
                    f"{part.dtype} in layer {part.layer}; expected another role for another shape"
                )
        if len({(part.layer, part.role.name) for part in self.parts}) < len(self.parts):
            raise ValueError("a layer has two parts of one role; expected a role for each")

    @staticmethod
    def of(parts: Iterable[StatePart]) -> StateLayout:
        """Make the layout of these parts."""
        return StateLayout(tuple(parts))

    def among(self, layers: range) -> StateLayout:
        """Return the parts of these layers only. Layer numbers stay."""
        return StateLayout(tuple(part for part in self.parts if part.layer in layers))

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """One Stack per role: first the roles in slots, then the roles with an entry per token."""
        by_role: dict[Role, list[StatePart]] = {}
        for part in self.parts:
            by_role.setdefault(part.role, []).append(part)
        return tuple(
            Stack(role, tuple(part.layer for part in parts), parts[0].shape, parts[0].dtype)
            for role, parts in sorted(by_role.items(), key=lambda item: item[0].extent is Extent.TOKENS)
        )

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot, which holds a state without its per-token parts."""
        return sum(part.num_bytes for part in self.parts if part.role.extent is not Extent.TOKENS)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes that each token adds; 0 for a model without attention."""
        return sum(part.num_bytes for part in self.parts if part.role.extent is Extent.TOKENS)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers; 0 for a model without attention."""
        return PAGE_TOKENS * self.token_bytes

    @property
    def has_tokens(self) -> bool:
        """Whether the model has per-token state, so that loading a stored snapshot needs its chain of parents."""
        return self.token_bytes > 0

    def stored(self) -> dict[str, TensorLayout]:
        """Return the tensors of a stored snapshot by name: the parts of each role, stacked by layer."""
        return {
            stack.role.name: TensorLayout(STORED_DTYPES[stack.dtype], (len(stack.layers), *stack.shape))
            for stack in self.stacks
        }

    @property
    def description(self) -> str:
        """Text of the layout in the fingerprint: axes and dtypes of every role. The sizes are in the architecture.

        SSM, CONV and KV are always included, used or not, because the fingerprints of existing stores contain all
        three.
        """
        roles = {role.name: role for role in (SSM, CONV, KV)} | {stack.role.name: stack.role for stack in self.stacks}
        return " ".join(role.description for role in roles.values())
