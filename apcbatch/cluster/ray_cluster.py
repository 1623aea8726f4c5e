"""RayCluster: a Ray cluster, joined or started here, and its machines.

Invariants:
- A local cluster ends with the RayCluster that started it.
- The signal handlers of this process are unchanged afterwards.
- A cluster that cannot be joined or started raises UsageError.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from apcbatch.errors import StoppedError, UsageError

LOCAL, AUTO = "local", "auto"
CONNECT_S = 10.0
HEAD_CHECK_S = 5.0  # interval between checks of the head
HEAD_GONE_S = 20.0  # the run stops after this time without the head; Ray would end this process after 60 s
LEAST_OBJECT_BYTES, MOST_OBJECT_BYTES = 128 << 20, 4 << 30
STATES_SHARE = 2  # half of a node's object store is for states made there, the other half for copies of others
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and an empty SETTINGS frame
SETTINGS = 4  # type of the first frame that an HTTP/2 server sends
QUIET: Mapping[str, Any] = {"configure_logging": False, "log_to_driver": False}
AUTH_MODE = "RAY_AUTH_MODE"
NO_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray's processes listen on loopback only, on any system
TOKEN_WAYS = "Ray reads ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster. cpus: number of cores for workers, 0 for a head without workers. gpus: number of
    GPUs."""

    cpus: int
    gpus: int = 0


def import_ray() -> Any:
    """Import Ray. Raises UsageError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--ray needs the package ray: pip install 'apcbatch[ray]' ({error})") from None
    return ray


class Head:
    """Connection checks of a cluster's head process, at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._address, self._host_port = address, _parsed(address)
        self._seen = self._checked = time.monotonic()

    def check(self) -> None:
        """Wait until the head answers. Raises StoppedError if it has not answered for HEAD_GONE_S.

        Call it regularly, and before each request to the head: such a request would block until Ray ends this process.
        """
        while self._host_port is not None:
            now = time.monotonic()
            if self._seen == self._checked and now - self._checked < HEAD_CHECK_S:
                return
            self._checked = now
            try:
                socket.create_connection(self._host_port, CONNECT_S).close()
                self._seen = now
                return
            except OSError as error:
                if time.monotonic() - self._seen > HEAD_GONE_S:
                    raise StoppedError(
                        f"the head of the Ray cluster at {self._address} is gone ({error}), and the cluster with it; "
                        "start one again, and continue with --resume, with or without --ray"
                    ) from None
            time.sleep(HEAD_CHECK_S / 5)


class RayCluster:
    """The Ray cluster at an address.

    address: `local` starts a cluster here, `auto` joins the cluster of this machine, and `HOST:PORT` joins the cluster
    with that head. cpus: number of cores of a local cluster. If this process is connected to a cluster already, both
    are ignored, and `close` leaves it connected.
    """

    def __init__(self, address: str, cpus: int | None = None) -> None:
        self.ray = import_ray()
        self._is_own = not self.ray.is_initialized()
        if self._is_own:
            _silence()
            with _own_signal_handlers():
                _start(self.ray, cpus) if address == LOCAL else _join(self.ray, address)
        self.head = Head(self.ray.get_runtime_context().gcs_address)

    def machines(self) -> list[Machine]:
        """Return the live machines."""
        live = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return [Machine(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in live]

    def live_nodes(self) -> set[str]:
        """Return Ray's node ids of the live machines."""
        self.head.check()
        return {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}

    def state_bytes(self, node_id: str) -> int:
        """Return how many bytes of exported states fit into a node's object store without spilling to disk."""
        stores = {node["NodeID"]: node["Resources"].get("object_store_memory") for node in self.ray.nodes()}
        return int(stores.get(node_id) or LEAST_OBJECT_BYTES) // STATES_SHARE

    def close(self) -> None:
        """Leave the cluster. A local cluster ends."""
        if self._is_own:
            self.ray.shutdown()


def _silence() -> None:
    """Keep Ray's process logs off the standard output and its advice off the standard error.

    The standard output is for results, and the runtime reports why a worker was lost. Ray has no option for the
    standard output, so its printing function is replaced.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    names = vars(sys.modules["ray._private.worker"])
    if "print_to_stdstream" in names:
        names["print_to_stdstream"] = lambda *_, **__: None


def _start(ray: Any, cpus: int | None) -> None:
    """Start a cluster here that listens on loopback only."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    object_bytes = min(max(memory // 8, LEAST_OBJECT_BYTES), MOST_OBJECT_BYTES)
    constants = sys.modules["ray._private.ray_constants"]
    was = vars(constants)["ENABLE_RAY_CLUSTER"]
    vars(constants)["ENABLE_RAY_CLUSTER"] = False
    try:
        with _environment(NO_CLUSTERS, "0"):
            ray.init(address=LOCAL, include_dashboard=False, object_store_memory=object_bytes, num_cpus=cpus, **QUIET)
    except Exception as error:  # Ray has no exception type for a failed start
        ray.shutdown()
        raise UsageError(
            f"--ray local: Ray cannot be started here ({_line(error)}); see the logs in /tmp/ray/session_latest/logs, "
            "or leave --ray out"
        ) from None
    finally:
        vars(constants)["ENABLE_RAY_CLUSTER"] = was


def _join(ray: Any, address: str) -> None:
    """Join the cluster at an address, in the cluster's authentication mode."""
    try:
        found = ray._private.services.canonicalize_bootstrap_address(address) if address == AUTO else address
        found = found or ""
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _cannot_join(address, error) from None
    if address != AUTO or found:
        _check_is_ray(found)
    try:
        with _environment(AUTH_MODE, _auth_mode(ray, address, found)):
            ray.init(address=found or address, include_dashboard=None, **QUIET)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError, ray.exceptions.RayError) as error:
        raise _cannot_join(address, error) from None


def _cannot_join(address: str, error: Exception) -> UsageError:
    return UsageError(
        f"--ray {address}: no Ray cluster can be joined ({_line(error)}); start one with `ray start --head`, run this "
        "on one of its machines, or give --ray local"
    )


def _auth_mode(ray: Any, address: str, found: str) -> str | None:
    """Return the RAY_AUTH_MODE that the cluster at `found` accepts; None to leave the variable unchanged.

    Ray itself looks for a token only if the address is `auto`, and then assumes that the cluster requires it. Raises
    UsageError if the cluster refuses the token here, or requires one that is missing.
    """
    raylet = sys.modules["ray._raylet"]
    if not hasattr(raylet, "AuthenticationTokenLoader"):
        return None  # this version of Ray has no tokens
    tokens = raylet.AuthenticationTokenLoader.instance()
    has_token = tokens.has_token(ignore_auth_mode=True)
    tokens.reset_cache()  # a cached token would be sent to a cluster without authentication
    refused: Exception | None = None
    for mode in ("disabled", "token") if has_token else ("disabled",):
        try:
            with _environment(AUTH_MODE, mode), _no_stderr():
                raylet.Config.initialize("")
                raylet.GcsClient(address=found).internal_kv_get(b"apcbatch", None, timeout=CONNECT_S)
            return mode
        except ray.exceptions.AuthenticationError as error:
            refused = error
    what = "the token here is not that cluster's" if has_token else "there is no token here"
    raise UsageError(
        f"--ray {address}: the cluster at {found} wants its token, and {what}; `ray get-auth-token` on its head shows "
        f"it, and {TOKEN_WAYS}"
    ) from refused


def _parsed(address: str) -> tuple[str, int] | None:
    """Return the host and port of an address; None if it is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if "://" not in address and host and port.isdecimal() else None


def _check_is_ray(address: str) -> None:
    """Raise UsageError at once if no gRPC server listens at an address. Ray itself would retry for minutes."""
    if (place := _parsed(address)) is None:
        raise UsageError(
            f"--ray {address} is not an address; expected local, auto, or HOST:PORT of the cluster's head, with this "
            "command on one of the cluster's machines (not ray://, whose client has no part in the cluster)"
        )
    where = "see `ray status` on the cluster's head for its address"
    try:
        with socket.create_connection(place, CONNECT_S) as connection:
            try:
                connection.sendall(HTTP2_HELLO)
                answer = connection.makefile("rb").read(4)
            except OSError:
                answer = b""
    except (OSError, OverflowError) as error:
        raise UsageError(f"--ray {address}: nothing answers there ({error}); {where}") from None
    if len(answer) < 4 or answer[3] != SETTINGS:
        raise UsageError(
            f"--ray {address}: what listens there is not the head of a Ray cluster, or hangs; {where} (its dashboard "
            "and its client have other ports)"
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable within the context. None leaves it unchanged."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Discard what Ray's C++ code writes to the standard error within the context."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces within the context. Ray replaces them in the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
