"""The model fingerprint: what a snapshot depends on besides its tokens.

Must not know: tensors, files. A pure function of plain values.
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
    of states, and the version of the kernels' arithmetic: any other one of these never shares a snapshot."""
    facts = {
        "architecture": dict(architecture),
        "weights": weights_digest.hex(),
        "dtype": dtype,
        "state_layout": state_layout,
        "numerics": numerics,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).digest()


def key_fingerprint(fingerprint: bytes, salt: str | None) -> bytes:
    """What prefix keys are made from: the fingerprint, or with a salt the HMAC-SHA-256 of the fingerprint under it.

    Whoever does not know the salt can neither make the keys that it leads to nor tell which prompts they stand for.
    """
    if salt is None:
        return fingerprint
    return hmac.digest(salt.encode("utf-8", "surrogatepass"), fingerprint, "sha256")
