"""A measured engine from outside: a process that answers the calls of protocol.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ENGINES = Path(__file__).resolve().parent
ROOT = ENGINES.parent.parent


class Engine:
    """A process that is asked one call at a time; SystemExit where it ended. command: an interpreter, one of the
    modules beside this one, its arguments. token_s: for the caller, seconds that a token of a prompt takes."""

    def __init__(self, interpreter: str, module: str, *arguments: str) -> None:
        command = [interpreter, str(ENGINES / module), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment()
        )
        self._read()
        self.token_s = 0.0

    def call(self, name: str, *arguments: Any) -> Any:
        """The reply to one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()["reply"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with status {self._process.wait()}; its message is above")
        return json.loads(line)


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ENGINES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
