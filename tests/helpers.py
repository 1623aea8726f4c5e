"""Helper processes (templates, grammars, tokenizers) that tests share: starting one takes 0.2 to 2 s."""

from __future__ import annotations

import marshal
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

from apcbatch.data import helper
from apcbatch.data.helper import Helper
from apcbatch.data.helper_child import _REQUEST_HEAD

MOST_IDLE = 16
_CHILD = helper._Child


@pytest.fixture(scope="session", autouse=True)
def shared_helpers() -> Iterator[None]:
    """A Helper takes over the idle process of an earlier one with the same module and first request."""
    idle: OrderedDict[tuple, Any] = OrderedDict()

    def keep(self: Helper, child: Any) -> None:
        if child is not None:
            idle[_identity(self._module, self._start)] = child
            while len(idle) > MOST_IDLE:
                idle.popitem(last=False)[1].end()

    def start(module: str, first: bytes) -> Any:
        return idle.pop(_identity(module, first), None) or _CHILD(module, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Helper, "_child", property(lambda self: None, keep), raising=False)
        patch.setattr(helper, "_Child", start)
        yield
    for child in idle.values():
        child.end()


def _identity(module: str, first: bytes) -> tuple:
    """What two Helpers that can have the same process agree in: of templates the clock only where it is read."""
    seconds, values = _REQUEST_HEAD.unpack_from(first)[1], marshal.loads(first[_REQUEST_HEAD.size :])
    if module.endswith("template_child") and "strftime_now" not in values[0]:
        values = values[:2]
    return os.getpid(), module, seconds, repr(values)


@pytest.fixture
def own_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Helper starts a process of its own, as in the product."""
    monkeypatch.delattr(Helper, "_child")
    monkeypatch.setattr(helper, "_Child", _CHILD)
