"""Weights that stay encoded in memory, as matrices whose rows a family selects, reorders and joins before it packs
them.

Invariant: a row is decoded by itself, element by element, to bfloat16((code - zero) * scale), rounded once to nearest,
ties to even: the bits that `model/decoding.py` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

CodeKind = Literal["int8", "int4", "fp8"]
_SOURCE = 1 << 40  # rows of one source at most
_ROWS_AT_ONCE = 1 << 12


@dataclass(frozen=True, eq=False)
class Codes:
    """Rows of codes. columns (c): of the weight. group (g): columns that share a scale; the last group may be shorter.
    codes: (r, c) uint8, two's complement or e4m3; of int4 (r, ceil(c / 2)), two's complement, low nibble first. scales:
    (r, ceil(c / g)) float32. zeros: (r, ceil(c / g)) int8, or None for zeros."""

    kind: CodeKind
    columns: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> Codes:
        """Return some rows. rows: (n,) int64."""
        zeros = None if self.zeros is None else self.zeros.index_select(0, rows)
        codes, scales = self.codes.index_select(0, rows), self.scales.index_select(0, rows)
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def decoded(self) -> torch.Tensor:
        """Return the rows (r, c) in bfloat16."""
        out = torch.empty(len(self.codes), self.columns, dtype=torch.bfloat16, device=self.codes.device)
        for begin in range(0, len(out), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            values, scales = self._values(self.codes[rows]), self._of_columns(self.scales[rows])
            if self.zeros is not None:
                values = values - self._of_columns(self.zeros[rows].float())
            out[rows] = values * scales
        return out

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if self.kind == "fp8":
            return codes.view(torch.float8_e4m3fn).float()
        if self.kind == "int8":
            return codes.view(torch.int8).float()
        both = torch.stack([codes << 4, codes & 0xF0], -1).view(torch.int8)
        return (both >> 4).float().view(len(codes), -1)[:, : self.columns]

    def _of_columns(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.repeat_interleave(self.group, 1)[:, : self.columns]


class EncodedRows:
    """A matrix (rows, columns), or several (.., rows, columns), made of rows of its sources. A source is Codes, or a
    tensor (r, columns) that is not encoded. Operations of a tensor that select, reorder and join rows work on it."""

    def __init__(self, sources: Sequence[Codes | torch.Tensor], rows: torch.Tensor) -> None:
        """rows: int64, in any shape: source * 2^40 + row."""
        self._sources, self._rows = tuple(sources), rows

    @classmethod
    def of(cls, source: Codes | torch.Tensor, *lead: int) -> EncodedRows:
        """All rows of a source. lead: shape of the leading dimensions, if there is more than one."""
        count = len(source.codes if isinstance(source, Codes) else source)
        return cls([source], torch.arange(count).view(*(lead or (count,))))

    @property
    def columns(self) -> int:
        first = self._sources[0]
        return first.columns if isinstance(first, Codes) else first.shape[1]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._rows.shape, self.columns))

    @property
    def device(self) -> torch.device:
        first = self._sources[0]
        return first.codes.device if isinstance(first, Codes) else first.device

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> EncodedRows:
        return EncodedRows(self._sources, self._rows[key])

    def view(self, *shape: int) -> EncodedRows:
        assert shape[-1] == self.columns, "a row is never cut"
        return EncodedRows(self._sources, self._rows.reshape(shape[:-1]))

    reshape = view

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.split:
            whole, sizes, *dim = args
            return [cls(whole._sources, rows) for rows in torch.split(whole._rows, sizes, *dim, **(kwargs or {}))]
        if function is torch.cat:
            sources: list[Codes | torch.Tensor] = []
            rows = []
            for part in args[0]:
                one = part if isinstance(part, EncodedRows) else cls.of(part)
                rows.append(one._rows + len(sources) * _SOURCE)
                sources += one._sources
            return cls(sources, torch.cat(rows))
        return NotImplemented

    def runs(self, multiple: int) -> Iterator[tuple[int, int, Codes | torch.Tensor]]:
        """Cut a matrix into runs of rows, each of codes of one kind or of bfloat16. Yields (begin, end, rows). Runs
        begin at multiples of `multiple`; rows between two multiples that are of several kinds are decoded."""
        rows = self._rows
        count = -(-len(rows) // multiple)
        padded = torch.cat([rows, rows[-1:].expand(count * multiple - len(rows))]).view(count, multiple)
        source = padded // _SOURCE
        kinds = [
            None if isinstance(one, torch.Tensor) else (one.kind, one.group, one.zeros is None) for one in self._sources
        ]
        numbers = torch.tensor([kinds.index(kind) if kind else -1 for kind in kinds])[source]
        alike = torch.where((numbers == numbers[:, :1]).all(1), numbers[:, 0], -1)
        ends = torch.unique_consecutive(alike, return_counts=True)[1].cumsum(0).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            first, last = begin * multiple, min(end * multiple, len(rows))
            yield first, last, self._taken(rows[first:last], bool(alike[begin] < 0))

    def decoded(self) -> torch.Tensor:
        """Return the matrices in bfloat16."""
        taken = self._taken(self._rows.reshape(-1), True)
        assert isinstance(taken, torch.Tensor)
        return taken.view(self.shape)

    def _taken(self, rows: torch.Tensor, is_decoded: bool) -> Codes | torch.Tensor:
        """Return the rows with these numbers (n,) int64: in bfloat16 if is_decoded, else as codes, which must be of one
        kind."""
        numbers, lengths = torch.unique_consecutive(rows // _SOURCE, return_counts=True)
        parts: list[Codes | torch.Tensor] = []
        for number, of_source in zip(numbers.tolist(), torch.split(rows, lengths.tolist()), strict=True):
            source, index = self._sources[number], (of_source % _SOURCE).to(self.device)
            if isinstance(source, torch.Tensor):
                parts.append(source.index_select(0, index).bfloat16())
            else:
                parts.append(source.take(index).decoded() if is_decoded else source.take(index))
        if is_decoded or len(parts) == 1:
            return torch.cat(parts) if is_decoded else parts[0]  # type: ignore[arg-type]
        codes = [one for one in parts if isinstance(one, Codes)]
        zeros = None if codes[0].zeros is None else torch.cat([one.zeros for one in codes if one.zeros is not None])
        return replace(
            codes[0],
            codes=torch.cat([one.codes for one in codes]),
            scales=torch.cat([one.scales for one in codes]),
            zeros=zeros,
        )
