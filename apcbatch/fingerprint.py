"""The model fingerprint: everything that a snapshot depends on besides its tokens.

Both functions are pure, over plain values.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any


def model_fingerprint(
    architecture: Mapping[str, Any], weights_digest: bytes, dtype: str, state_layout: str, numerics: str
) -> bytes:
    """SHA-256 (32 bytes) over the weights' digest, the architecture, the dtype of weights and activations, the layout
    of states, and the version of the kernels' arithmetic: models that differ in any of these never share a snapshot."""
    facts = {
        "architecture": dict(architecture),
        "weights": weights_digest.hex(),
        "dtype": dtype,
        "state_layout": state_layout,
        "numerics": numerics,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).digest()


def key_fingerprint(fingerprint: bytes, salt: str | None) -> bytes:
    """The input of prefix keys: the fingerprint, or with a salt the HMAC-SHA-256 of the fingerprint under it.

    Without the salt, nobody can compute the keys or test which prompts they belong to.
    """
    if salt is None:
        return fingerprint
    return hmac.digest(salt.encode("utf-8", "surrogatepass"), fingerprint, "sha256")
