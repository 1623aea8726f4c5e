"""Read a model's rotary position embedding from its config.json, with the keys of transformers 5 or of older versions.

Su et al., "RoFormer", arXiv 2104.09864. Invariant: only the plain embedding is accepted; for any other, an error names
its type or key.
"""

from __future__ import annotations

from typing import NamedTuple

from apcbatch.model.hf_config import ConfigReader

# mrope: a text token has the same position in every section, so for text it equals the plain embedding.
_PLAIN = ("default", "mrope")
_SCALINGS = {
    "yarn": "YaRN",
    "linear": "linear scaling",
    "dynamic": "dynamic NTK scaling",
    "longrope": "LongRoPE",
    "su": "LongRoPE",
    "llama3": "the scaling of Llama 3",
}
_KEYS = ("rope_theta", "partial_rotary_factor", "rope_type", "type", "mrope_section", "mrope_interleaved")
_DEFAULT_THETA = 10_000.0


class Rotary(NamedTuple):
    """A rotary embedding. dim: number of columns of a head that are rotated, the first ones. theta: base of the
    wavelengths."""

    dim: int
    theta: float


def read_rotary(
    reader: ConfigReader, head_dim: int, default_factor: float, default_theta: float = _DEFAULT_THETA
) -> Rotary:
    """Return the rotary embedding of config.json. default_factor: fraction of a head's columns to rotate if the file
    does not say. default_theta: base of the wavelengths then. Raises ModelError."""
    has_older = bool(reader.values.get("rope_scaling"))  # transformers takes it before rope_parameters
    table = reader.below("rope_scaling" if has_older else "rope_parameters")
    kind = "rope_type" if "rope_type" in table.values else "type"
    scaling = next((name for word, name in _SCALINGS.items() if table.values.get(kind) == word), None)
    if scaling is not None:
        fits = '"default", for the context that the model was trained with'
        raise table.wrong(kind, table.values[kind], f"{fits}: {scaling}, for longer ones, is not supported")
    table.require(kind, "default", *_PLAIN)
    for key, value in table.values.items():
        if key not in _KEYS:
            raise table.wrong(key, value, f"no key besides {', '.join(_KEYS)}: only the default embedding is supported")

    def holder(key: str) -> ConfigReader:
        return table if key in table.values else reader

    theta = holder("rope_theta").number("rope_theta", default_theta, minimum=1)
    factor = holder("partial_rotary_factor").number("partial_rotary_factor", default_factor)
    dim = int(head_dim * factor) if 0 < factor <= 1 else 0
    if not dim or dim % 2:
        expected = f"a factor up to 1 that makes an even number of the {head_dim} columns of a head"
        raise holder("partial_rotary_factor").wrong("partial_rotary_factor", factor, expected)
    return Rotary(dim, theta)


def read_whole_rotary(reader: ConfigReader, head_dim: int, default_theta: float = _DEFAULT_THETA) -> Rotary:
    """Return the rotary embedding of config.json for a family that rotates all columns of a head. Raises ModelError if
    the file says otherwise."""
    rotary = read_rotary(reader, head_dim, 1.0, default_theta)
    if rotary.dim != head_dim:
        raise reader.wrong("partial_rotary_factor", rotary.dim / head_dim, "1, the only one supported")
    return rotary
