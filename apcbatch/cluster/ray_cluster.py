"""RayCluster: a Ray cluster that was joined, or started here, and what it has.

Must not know: workers, units. Invariants: a cluster that was started here ends with it; what handles this process's
signals is what it was before; a cluster that cannot be had is a UsageError with a sentence.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from apcbatch.cluster.sizing import Machine
from apcbatch.errors import UsageError

LOCAL, AUTO = "local", "auto"
CONNECT_S = 10.0
LEAST_OBJECT_BYTES, MOST_OBJECT_BYTES = 128 << 20, 4 << 30
STATES_SHARE = 2  # of a node's object store, one part is for states that have their home there, one for copies


def import_ray() -> Any:
    """The package; UsageError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--ray needs the package ray: pip install 'apcbatch[ray]' ({error})") from None
    return ray


class RayCluster:
    """The cluster at an address. address: `local` starts one here, `auto` joins the one that this machine belongs to,
    `HOST:PORT` the one whose head that is. cpus: of a local one. A program that has joined a cluster by itself stays in
    it, and then the address is not looked at."""

    def __init__(self, address: str, cpus: int | None = None) -> None:
        self.ray = import_ray()
        self._is_ours = not self.ray.is_initialized()
        if self._is_ours:
            _silence()
            with _own_signal_handlers():
                _join(self.ray, address, cpus)

    def machines(self) -> list[Machine]:
        """The machines that are there now."""
        live = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return [Machine(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in live]

    def live_nodes(self) -> set[str]:
        """Ray's ids of the machines that are there."""
        return {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}

    def state_bytes(self, node_id: str) -> int:
        """What states may take on a node so that its object store need not move them to disk."""
        stores = {node["NodeID"]: node["Resources"].get("object_store_memory") for node in self.ray.nodes()}
        return int(stores.get(node_id) or LEAST_OBJECT_BYTES) // STATES_SHARE

    def close(self) -> None:
        """Leave it; one that was started here ends."""
        if self._is_ours:
            self.ray.shutdown()


def _silence() -> None:
    """Keep what Ray says of its processes off the standard output, which is for results, and its advice off the
    standard error. What matters is told as the reason why a worker is lost. Ray has no option for the first."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    names = vars(sys.modules["ray._private.worker"])
    if "print_to_stdstream" in names:
        names["print_to_stdstream"] = lambda *_, **__: None


def _join(ray: Any, address: str, cpus: int | None) -> None:
    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False, "include_dashboard": None}
    if address == LOCAL:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        object_bytes = min(max(memory // 8, LEAST_OBJECT_BYTES), MOST_OBJECT_BYTES)
        quiet |= {"include_dashboard": False, "object_store_memory": object_bytes, "num_cpus": cpus}
    elif address != AUTO:
        _check_reachable(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--ray {address}: no Ray cluster can be joined ({reason}); start one with `ray start --head`, run this on "
            "one of its machines, or give --ray local"
        ) from None


def _check_reachable(address: str) -> None:
    """Refuse at once what Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise UsageError(
            f"--ray {address} is not an address; expected local, auto, or HOST:PORT of the cluster's head, with this "
            "command on one of the cluster's machines (not ray://, whose client has no part in the cluster)"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--ray {address}: nothing answers there ({error}); see `ray status` on the cluster's head for its address"
        ) from None


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put back the handlers that Ray replaces, which it does in the main thread alone."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
