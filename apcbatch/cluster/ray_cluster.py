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
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from apcbatch.cluster.sizing import Machine
from apcbatch.errors import StoppedError, UsageError

LOCAL, AUTO = "local", "auto"
CONNECT_S = 10.0
HEAD_LOOKED_AT_S = 5.0  # the head is looked at so often
HEAD_GONE_S = 20.0  # and is given up when it was not there for so long; Ray ends this process after 60 s
LEAST_OBJECT_BYTES, MOST_OBJECT_BYTES = 128 << 20, 4 << 30
STATES_SHARE = 2  # of a node's object store, one part is for states that have their home there, one for copies
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and no settings
SETTINGS = 4  # the type of the frame with which an HTTP/2 server begins
QUIET: Mapping[str, Any] = {"configure_logging": False, "log_to_driver": False}
AUTH_MODE = "RAY_AUTH_MODE"
NO_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # with 0 Ray's processes listen on loopback alone, on any system
TOKEN_WAYS = "Ray reads ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"


def import_ray() -> Any:
    """The package; UsageError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--ray needs the package ray: pip install 'apcbatch[ray]' ({error})") from None
    return ray


class Head:
    """The process that all of a cluster depends on, at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._address, self._place = address, _parsed(address)
        self._seen = self._looked_at = time.monotonic()

    def check(self) -> None:
        """Wait until the head is there; StoppedError once it was not for too long. To be called now and then, and
        before whatever asks the head: that would wait for it until Ray ends this process."""
        while self._place is not None:
            now = time.monotonic()
            if self._seen == self._looked_at and now - self._looked_at < HEAD_LOOKED_AT_S:
                return
            self._looked_at = now
            try:
                socket.create_connection(self._place, CONNECT_S).close()
                self._seen = now
                return
            except OSError as error:
                if time.monotonic() - self._seen > HEAD_GONE_S:
                    raise StoppedError(
                        f"the head of the Ray cluster at {self._address} is gone ({error}), and the cluster with it; "
                        "start one again, and continue with --resume, with or without --ray"
                    ) from None
            time.sleep(HEAD_LOOKED_AT_S / 5)


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
                _start(self.ray, cpus) if address == LOCAL else _join(self.ray, address)
        self.head = Head(self.ray.get_runtime_context().gcs_address)

    def machines(self) -> list[Machine]:
        """The machines that are there now."""
        live = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return [Machine(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in live]

    def live_nodes(self) -> set[str]:
        """Ray's ids of the machines that are there."""
        self.head.check()
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


def _start(ray: Any, cpus: int | None) -> None:
    """Start a cluster here, which listens on loopback alone."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    object_bytes = min(max(memory // 8, LEAST_OBJECT_BYTES), MOST_OBJECT_BYTES)
    constants = sys.modules["ray._private.ray_constants"]
    was = vars(constants)["ENABLE_RAY_CLUSTER"]
    vars(constants)["ENABLE_RAY_CLUSTER"] = False
    try:
        with _environment(NO_CLUSTERS, "0"):
            ray.init(address=LOCAL, include_dashboard=False, object_store_memory=object_bytes, num_cpus=cpus, **QUIET)
    except Exception as error:  # Ray has no type for a start that fails
        ray.shutdown()
        raise UsageError(
            f"--ray local: Ray cannot be started here ({_line(error)}); see the logs in /tmp/ray/session_latest/logs, "
            "or leave --ray out"
        ) from None
    finally:
        vars(constants)["ENABLE_RAY_CLUSTER"] = was


def _join(ray: Any, address: str) -> None:
    """Join the cluster at an address, with its way of authentication."""
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
    """What RAY_AUTH_MODE must be for the cluster that was found; None to leave it. Ray itself looks for a token where
    the address is `auto` and nowhere else, and then takes the cluster to have one too."""
    raylet = sys.modules["ray._raylet"]
    if not hasattr(raylet, "AuthenticationTokenLoader"):
        return None  # an earlier Ray
    tokens = raylet.AuthenticationTokenLoader.instance()
    has_token = tokens.has_token(ignore_auth_mode=True)
    tokens.reset_cache()  # with one in it this process would ask a cluster without a token for it
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
    """The host and the port; None for what has none."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if "://" not in address and host and port.isdecimal() else None


def _check_is_ray(address: str) -> None:
    """Refuse at once what Ray would try for minutes: nothing that listens there, or something else than gRPC."""
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
    """Have a variable of the environment set for a while; None to leave it as it is."""
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
    """Drop what Ray's C++ writes to the standard error of this process for a moment."""
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
    """Put back the handlers that Ray replaces, which it does in the main thread alone."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
