"""The driver's side of a cluster needs neither torch nor Ray."""

from __future__ import annotations

import subprocess
import sys


def test_the_driver_imports_no_torch_and_no_ray() -> None:
    """Catches a driver that needs what only its workers should, and Ray where nobody asked for a cluster."""
    names = "crew driver intake items localise loose placing queue rates seam settings states unit units".split()
    code = "import sys\n" + "".join(f"import apcbatch.cluster.{name}\n" for name in names)
    code += "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
