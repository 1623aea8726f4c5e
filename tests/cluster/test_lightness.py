"""The driver's side of a cluster needs neither torch nor Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import apcbatch.cluster


@pytest.mark.slow
def test_the_driver_imports_no_torch_and_no_ray() -> None:
    """Catches a driver that needs what only its workers should, and Ray where nobody asked for a cluster."""
    folder = Path(apcbatch.cluster.__path__[0])
    names = [path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "worker")]
    code = "import sys\n" + "".join(f"import apcbatch.cluster.{name}\n" for name in names)
    code += "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
