"""The constants of the store's bytes: names, versions and limits. docs/store-format.md describes them on one
page.

Must not know: how anything is read or written. Whoever changes a value that is already on somebody's disk
raises FORMAT_VERSION and adds a golden file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1
FORMAT_NAME = f"apcbatch snapshot {FORMAT_VERSION}"

MARKER_NAME = "apcbatch-store"
MARKER = f"apcbatch snapshot store {FORMAT_VERSION}\n".encode()
INDEX_NAME = "index.sqlite"
INDEX_COMPANIONS = ("-wal", "-shm", "-journal")
ASIDE_SUFFIX = ".damaged"
SUSPECT_NAME = "index.suspect"
OBJECTS_FOLDER = "objects"
TEMPORARY_FOLDER = "tmp"
LOCK_NAME = "store.lock"
OBJECT_SUFFIX = ".safetensors"

KEY_BYTES = 32
MAX_FINGERPRINT_BYTES = 64
MAX_HEADER_BYTES = 16 * 1024
MAX_FILE_BYTES = 1 << 36
MAX_POSITION = 1 << 40
MAX_USES = 1 << 53
MAX_PRIORITY = 1e30
MAX_TENSORS = 16
MAX_DIMENSIONS = 8
MAX_NAME_LENGTH = 32
HEADER_ALIGNMENT_BYTES = 64

DTYPES: dict[str, npt.DTypeLike] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""safetensors dtype -> NumPy dtype. NumPy has no bfloat16: a uint16 array holds the bits of one."""

DTYPE_OF: dict[np.dtype[np.generic], str] = {np.dtype(numpy): name for name, numpy in DTYPES.items()}
