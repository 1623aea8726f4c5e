"""Datasets as `hf:org/name[:split]`, streamed through `datasets`.

Must not know: rows, formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from apcbatch.data.tables import ROWS_AT_ONCE, table_errors
from apcbatch.errors import UsageError

if TYPE_CHECKING:
    from pyarrow.lib import RecordBatch

HUB_PREFIX = "hf:"


def is_hub(name: str) -> bool:
    """Whether a name is one of a dataset; `hf://` is an address."""
    return name.startswith(HUB_PREFIX) and not name.startswith(f"{HUB_PREFIX}//")


def open_hub(spec: str) -> Iterator[RecordBatch]:
    """The batches of `hf:org/name[:split]`; without a split, of the only one or of `train`. Raises UsageError."""
    loaded = _load(spec)
    tables = loaded.with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
    return (batch for table in tables for batch in table.to_batches())


def hub_errors() -> tuple[type[Exception], ...]:
    """What reading a dataset may raise."""
    from datasets.exceptions import DatasetsError

    return (*table_errors(), DatasetsError)


def _load(spec: str) -> Any:
    name, _, split = spec.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise UsageError(f"{spec} names no dataset; expected hf:org/name or hf:org/name:split")
    from datasets.load import load_dataset

    try:
        loaded = load_dataset(name, split=split or None, streaming=True)
    except hub_errors() as error:
        lines = str(error).strip().splitlines()
        reason = lines[0].rstrip(".")[:300] if lines else type(error).__name__
        raise UsageError(
            f"cannot open {spec}: {reason}; check the name, the split and the network, "
            "or download the dataset and give its parquet file"
        ) from None
    if not isinstance(loaded, dict):
        return loaded
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    if "train" not in loaded:
        splits = ", ".join(map(str, loaded))
        raise UsageError(f"{spec} has the splits {splits}; choose one: {spec}:{next(iter(loaded))}")
    return loaded["train"]
