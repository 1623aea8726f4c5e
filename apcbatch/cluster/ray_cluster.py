"""RayCluster: a Ray cluster, joined or started here, and its machines.

Invariants:
- A local cluster ends with the RayCluster that started it.
- The signal handlers of this process are unchanged afterwards.
- A cluster that cannot be joined or started raises UsageError.
- Once a process that the driver depends on is gone, no call of Ray is begun: it would block, or end this process.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from apcbatch.errors import StoppedError, UsageError

LOCAL, AUTO = "local", "auto"
CONNECT_S = 10.0
CHECK_S = 5.0  # interval between connections to the head
RETRY_S = 1.0  # interval between attempts to connect, and between checks while a call blocks
HEAD_GONE_S = 20.0  # the run stops after this time without the head; Ray would end this process after 60 s
LEAST_OBJECT_BYTES, MOST_OBJECT_BYTES = 128 << 20, 4 << 30
STATES_SHARE = 2  # half of a node's object store is for states made there, the other half for copies of others
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and an empty SETTINGS frame
SETTINGS = 4  # type of the first frame that an HTTP/2 server sends
QUIET: Mapping[str, Any] = {"configure_logging": False, "log_to_driver": False}
AUTH_MODE = "RAY_AUTH_MODE"
NO_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray's processes listen on loopback only, on any system
TOKEN_WAYS = "Ray reads ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"

T = TypeVar("T")


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


class Server:
    """A process of the cluster that the driver depends on, watched through a connection that stays open: the system
    closes it when the process ends.

    what: the process, as it is named to users. place: HOST and port, or the path of a socket. gone_s: time without a
    connection after which the process counts as gone.
    """

    def __init__(self, what: str, place: tuple[str, int] | str, gone_s: float) -> None:
        self._what, self._place, self._gone_s = what, place, gone_s
        self._connection: socket.socket | None = None
        self._seen = time.monotonic()

    def check(self) -> None:
        """Wait until the process is connected. Raises StoppedError if it has not been for gone_s."""
        while not self._is_connected():
            try:
                self._connect()
            except OSError as error:
                if time.monotonic() - self._seen >= self._gone_s:
                    raise StoppedError(
                        f"{self._what} is gone ({error.strerror or error}), and with it the cluster; start one again, "
                        "and continue with --resume, with or without --ray"
                    ) from None
                time.sleep(RETRY_S)

    def _is_connected(self) -> bool:
        """Return whether the other end keeps the connection open. A connection to a head must also be younger than
        CHECK_S, because a machine that loses its power closes nothing."""
        is_old = not isinstance(self._place, str) and time.monotonic() - self._seen > CHECK_S
        if self._connection is None or is_old:
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return not poll.poll(0)

    def _connect(self) -> None:
        self.close()
        if isinstance(self._place, str):
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(self._place)
        else:
            self._connection = socket.create_connection(self._place, CONNECT_S)
        self._seen = time.monotonic()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


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
        self._servers: list[Server] = []
        self._gone: StoppedError | None = None
        context = self.ray.get_runtime_context()
        address = context.gcs_address
        if (place := _parsed(address)) is not None:
            self._servers.append(Server(f"the head of the Ray cluster at {address}", place, HEAD_GONE_S))
        own = next((node for node in self._nodes() if node["NodeID"] == context.get_node_id()), {})
        if os.path.exists(path := own.get("RayletSocketName", "")):  # first: it does not come back
            self._servers.insert(0, Server("the raylet, Ray's process on this machine,", path, 0.0))

    def check(self) -> None:
        """Check all servers. Raises StoppedError if one is gone. Call it before each call of Ray."""
        if self._gone is not None:
            raise self._gone
        try:
            for server in self._servers:
                server.check()
        except StoppedError as error:
            self._gone = error
            raise

    def call(self, act: Callable[[], T]) -> T:
        """Return the result of a function that asks the head. Raises StoppedError if a server is gone by then.

        The function runs in a thread, because a call of Ray blocks while the head is gone.
        """
        self.check()
        future: Future[T] = Future()
        threading.Thread(target=fulfil, args=(future, act), daemon=True).start()
        while not wait([future], RETRY_S).done:
            self.check()
        try:
            return future.result()
        except Exception:  # for want of the head, or of a worker
            self.check()
            raise

    def machines(self) -> list[Machine]:
        """Return the live machines."""
        live = [node["Resources"] for node in self._nodes() if node["Alive"]]
        return [Machine(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in live]

    def live_nodes(self) -> set[str]:
        """Return Ray's node ids of the live machines."""
        return {node["NodeID"] for node in self._nodes() if node["Alive"]}

    def state_bytes(self, node_id: str) -> int:
        """Return how many bytes of exported states fit into a node's object store without spilling to disk."""
        stores = {node["NodeID"]: node["Resources"].get("object_store_memory") for node in self._nodes()}
        return int(stores.get(node_id) or LEAST_OBJECT_BYTES) // STATES_SHARE

    def _nodes(self) -> list[dict[str, Any]]:
        """Return Ray's records of the nodes."""
        nodes: list[dict[str, Any]] = self.call(self.ray.nodes)
        return nodes

    def close(self) -> None:
        """Leave the cluster. A local cluster ends."""
        for server in self._servers:
            server.close()
        if self._is_own:
            self.ray.shutdown()


def fulfil(future: Future[T], act: Callable[[], T]) -> None:
    """Give a future the result of a function, or its error."""
    try:
        future.set_result(act())
    except Exception as error:  # raised where the result is awaited
        future.set_exception(error)


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
    """Start a cluster here that listens on loopback only. Its workers have this process's niceness, not Ray's 15."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    object_bytes = min(max(memory // 8, LEAST_OBJECT_BYTES), MOST_OBJECT_BYTES)
    constants = sys.modules["ray._private.ray_constants"]
    was = vars(constants)["ENABLE_RAY_CLUSTER"]
    vars(constants)["ENABLE_RAY_CLUSTER"] = False
    try:
        with _environment(NO_CLUSTERS, "0"), _no_stderr():
            ray.init(
                address=LOCAL,
                include_dashboard=False,
                object_store_memory=object_bytes,
                num_cpus=cpus,
                _system_config={"worker_niceness": 0},
                **QUIET,
            )
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
        with _environment(AUTH_MODE, _auth_mode(ray, address, found)), _no_stderr():
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
