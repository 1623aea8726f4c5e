"""Joining a Ray cluster, or starting one: what cannot be had is a sentence, soon, and what asks for a token gets it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.cluster import ray_cluster
from apcbatch.cluster.ray_cluster import AUTH_MODE, RayCluster, Server
from apcbatch.errors import StoppedError, UsageError
from tests.effort import table


class Refused(Exception):
    """As ray.exceptions.AuthenticationError."""


def test_an_address_that_is_none_is_refused() -> None:
    """Catches an address that Ray would try for minutes, or take for something else."""
    pytest.importorskip("ray")
    for address in ["ray://head:10001", "head", "head:port", ":6379"]:
        with pytest.raises(UsageError, match="expected local, auto, or HOST:PORT"):
            RayCluster(address)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A port of this machine where somebody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield one


def address_of(one: socket.socket) -> str:
    return f"127.0.0.1:{one.getsockname()[1]}"


def test_an_address_where_nobody_answers_is_refused(listening: socket.socket) -> None:
    """Catches a run that waits for a cluster that is not there."""
    pytest.importorskip("ray")
    address = address_of(listening)
    listening.close()
    with pytest.raises(UsageError, match="nothing answers there"):
        RayCluster(address)


def nothing(**parts: Any) -> SimpleNamespace:
    """A Ray that is connected to no cluster, finds none, and shows none after it has joined one."""
    context = SimpleNamespace(gcs_address="", get_node_id=lambda: "here")
    services = SimpleNamespace(canonicalize_bootstrap_address=lambda address: "")
    errors = SimpleNamespace(AuthenticationError=Refused, RayError=Refused)
    return SimpleNamespace(**{
        "is_initialized": lambda: False, "get_runtime_context": lambda: context, "nodes": list, "exceptions": errors,
        "_private": SimpleNamespace(services=services), "shutdown": lambda: None, **parts,
    })  # fmt: skip


def join(monkeypatch: pytest.MonkeyPatch, address: str, ray: SimpleNamespace) -> RayCluster:
    """Join or start a cluster through this Ray."""
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: ray)
    monkeypatch.setitem(sys.modules, "ray._private.worker", SimpleNamespace())
    return RayCluster(address, 1)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_what_is_not_ray_is_refused(
    answer: bytes | None, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a port where something else listens, ends the connection or hangs, which Ray tries for four minutes."""
    monkeypatch.setattr(ray_cluster, "CONNECT_S", 0.5)
    held = []

    def serve() -> None:
        held.append(listening.accept()[0])
        if answer is not None:
            held[0].sendall(answer)
            held[0].close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(UsageError, match="is not the head of a Ray cluster, or hangs"):
        join(monkeypatch, address_of(listening), nothing())
    thread.join()


def auth_mode(monkeypatch: pytest.MonkeyPatch, wants: str | None, token: str | None) -> str | None:
    """The mode in which a cluster that wants this token is joined, with this token here; Ray's own parts played."""
    modes: list[str | None] = []
    cached: list[str] = []

    class Loader:
        def has_token(self, ignore_auth_mode: bool) -> bool:
            cached.append("from now on this process asks others for its token")
            return token is not None

        def reset_cache(self) -> None:
            cached.clear()

    class Gcs:
        def __init__(self, address: str) -> None:
            assert not cached and (os.environ[AUTH_MODE] == "disabled" or token is not None), "Ray ends the process"
            if wants is not None and (os.environ[AUTH_MODE] != "token" or token != wants):
                raise Refused("InvalidAuthToken")

        def internal_kv_get(self, key: bytes, namespace: None, timeout: float) -> None:
            return None

    raylet = SimpleNamespace(
        AuthenticationTokenLoader=SimpleNamespace(instance=Loader),
        Config=SimpleNamespace(initialize=lambda text: None),
        GcsClient=Gcs,
    )
    monkeypatch.setitem(sys.modules, "ray._raylet", raylet)
    join(monkeypatch, "auto", nothing(init=lambda **options: modes.append(os.environ.get(AUTH_MODE)))).close()
    return modes.pop()


def test_a_token_is_given_where_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a secured cluster that HOST:PORT cannot join, an open one whose workers `auto` loses because a token is
    at home, and an environment that is not left as it was."""
    for wants, token, mode in [(None, None, "disabled"), (None, "a", "disabled"), ("a", "a", "token")]:
        for given in [None, "disabled", "token"]:
            monkeypatch.delenv(AUTH_MODE, raising=False)
            if given is not None:
                monkeypatch.setenv(AUTH_MODE, given)
            assert auth_mode(monkeypatch, wants, token) == mode
            assert os.environ.get(AUTH_MODE) == given


@table("token, what", [(None, "there is no token here"), ("b", "is not that cluster's")])
def test_a_token_that_is_not_had_is_named(token: str | None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches raw lines of Ray's, and advice to do what was done, where a token is missing or another one."""
    with pytest.raises(UsageError, match=f"wants its token, and .*{what}.* ray get-auth-token".replace(" ray", ".*")):
        auth_mode(monkeypatch, "a", token)


def test_a_start_that_fails_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `internal error` where Ray cannot be started, what is left of it, and a Ray that listens to all."""
    ray: Any = pytest.importorskip("ray")
    from ray._private import ray_constants

    ended, was = [], ray_constants.ENABLE_RAY_CLUSTER

    def init(**options: Any) -> None:
        assert not ray_constants.ENABLE_RAY_CLUSTER and os.environ[ray_cluster.NO_CLUSTERS] == "0"
        raise Exception("The current node timed out during startup.\nSee the logs.")  # which is all that Ray says

    fake = nothing(init=init, shutdown=lambda: ended.append(True), exceptions=ray.exceptions)
    with pytest.raises(UsageError, match="--ray local: Ray cannot be started here .The current node timed out"):
        join(monkeypatch, "local", fake)
    assert ended and was == ray_constants.ENABLE_RAY_CLUSTER and ray_cluster.NO_CLUSTERS not in os.environ


@pytest.fixture(params=["head", "raylet"])
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """What listens as a head does, at a port, or as a raylet, at a path."""
    is_head = request.param == "head"
    with socket.socket(socket.AF_INET if is_head else socket.AF_UNIX) as one:
        one.bind(("127.0.0.1", 0) if is_head else str(tmp_path / "raylet"))
        one.listen()
        yield one


def test_a_server_that_ends_is_gone_at_once(serving: socket.socket) -> None:
    """Catches a check that answers from its last one for some seconds after the process has ended, in which a call of
    Ray blocks or ends this process."""
    server = Server("the head", serving.getsockname(), 0.0)
    server.check()
    taken = serving.accept()[0]
    server.check()
    taken.close()
    server.check()  # it has ended the connection, and takes another
    serving.accept()[0].close()
    serving.close()
    with pytest.raises(StoppedError, match="the head is gone .* continue with --resume, with or without --ray"):
        server.check()


def test_a_server_that_comes_back_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that ends with a head that is only started again."""
    slept: list[float] = []
    with socket.socket(socket.AF_UNIX) as again:

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            again.bind(str(tmp_path / "head"))
            again.listen()

        monkeypatch.setattr(ray_cluster.time, "sleep", sleep)
        server = Server("the head", str(tmp_path / "head"), 60.0)
        server.check()
        server.close()
    assert slept == [ray_cluster.RETRY_S]


@pytest.mark.parametrize("end", ["blocks", "fails"])
def test_a_call_that_loses_the_head_is_a_stop(
    end: str, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a call that blocks until Ray ends this process, and Ray's own error in place of the sentence."""
    monkeypatch.setattr(ray_cluster, "HEAD_GONE_S", 0.0)
    monkeypatch.setattr(ray_cluster, "RETRY_S", 0.01)
    context = SimpleNamespace(gcs_address=address_of(listening), get_node_id=lambda: "here")
    ended = threading.Event()
    fake = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context, nodes=lambda: [])
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: fake)
    cluster = RayCluster("auto")

    def nodes() -> None:
        listening.accept()[0].close()
        listening.close()
        if end == "fails":
            raise ConnectionError("RPC error: failed to connect to all addresses")
        ended.wait()

    fake.nodes = nodes
    with pytest.raises(StoppedError, match="the head of the Ray cluster at 127.* is gone"):
        cluster.live_nodes()
    with pytest.raises(StoppedError):  # and no further call is begun
        cluster.call(lambda: pytest.fail("a call of a cluster that is gone"))
    ended.set()
    cluster.close()
