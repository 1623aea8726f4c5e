"""The machine that a run was made on, in words and numbers.

Must not know: runs. It imports no torch: what torch would have to say is left open where nobody has imported it.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any


def describe_machine(device: str) -> dict[str, Any]:
    """cpu: the processor's name. cores: those that this process may use; threads: those that torch does. memory_bytes,
    system, python, torch. gpu: the device's name if `device` is cuda. instructions: the set of the CPU kernels. None
    for what is not known."""
    torch, isa = sys.modules.get("torch"), sys.modules.get("apcbatch.kernels.isa")
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": None if torch is None else torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": torch.cuda.get_device_name() if torch is not None and device == "cuda" else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
        "instructions": None if isa is None else isa.isa(),
    }


def processor() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
