"""The model fingerprint: identifies everything that a snapshot depends on besides its tokens.

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
    """Return SHA-256 (32 bytes) over all arguments. Models that differ in any of them never share a snapshot.

    architecture: the model's configuration. weights_digest: digest of the weights. dtype: dtype of weights and
    activations. state_layout: StateLayout.description. numerics: version of the kernels' arithmetic.
    """
    facts = {
        "architecture": dict(architecture),
        "weights": weights_digest.hex(),
        "dtype": dtype,
        "state_layout": state_layout,
        "numerics": numerics,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).digest()


def key_fingerprint(fingerprint: bytes, salt: str | None) -> bytes:
    """Return the fingerprint that prefix keys hash: HMAC-SHA-256 of the model's fingerprint under the salt.

    salt: None returns the model's fingerprint unchanged. Without knowing the salt it is impossible to compute the keys,
    or to test which prompts they belong to.
    """
    if salt is None:
        return fingerprint
    return hmac.digest(salt.encode("utf-8", "surrogatepass"), fingerprint, "sha256")
