"""Ports, Ray's address and the retriever's hosts, on the real network of this machine or of a namespace."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from e2e_world import ENV, ROOT, free_port

from verl.config import Config
from verl.trainer.preflight.network import check_hosts, check_network, check_port, check_ray

NOWHERE = "no-such-host.invalid"  # a name that no DNS may ever resolve (RFC 6761)


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "level", "says"),
    [
        ("127.0.0.1", "ok", "127.0.0.1 can be listened on"),
        ("192.0.2.1", "FAIL", "Cannot assign requested address"),  # TEST-NET-1: nobody's own
    ],
)
def test_a_port_to_meet_at(host: str, level: str, says: str) -> None:
    found = check_port(host)
    assert found.level == level and says in str(found)


def test_a_machine_without_loopback() -> None:
    """In a network namespace of its own, whose loopback interface is down."""
    namespace = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no network namespaces")
    program = "from verl.trainer.preflight.network import check_port; print(check_port('127.0.0.1'))"
    done = subprocess.run(
        [*namespace, sys.executable, "-c", program], cwd=ROOT, env=ENV, capture_output=True, text=True
    )
    assert done.stdout.startswith("FAIL ports: this machine cannot connect to its own port on 127.0.0.1"), done.stderr


@pytest.mark.parametrize(
    ("address", "nnodes", "level"),
    [
        (None, 1, "ok"),
        ("", 1, "ok"),
        (None, 2, "warn"),
        ("local", 1, "ok"),
        ("local", 2, "FAIL"),
        ("auto", 2, "ok"),
        ("127.0.0.1", 1, "FAIL"),  # without a port
        (f"{NOWHERE}:6379", 1, "FAIL"),
    ],
)
def test_where_ray_is(address: str | None, nnodes: int, level: str) -> None:
    assert check_ray(address, nnodes).level == level


def test_a_head_that_answers_and_one_that_does_not(listening: int) -> None:
    for address in (f"127.0.0.1:{listening}", f"ray://127.0.0.1:{listening}"):
        assert check_ray(address, 2).level == "ok"
    dead = f"127.0.0.1:{free_port()}"
    found = check_ray(dead, 1)
    assert found.level == "FAIL" and f"RAY_ADDRESS={dead}" in found.found and "ray start --head" in found.todo


def test_a_real_cluster_is_reached(ray_session) -> None:
    assert check_ray(ray_session.get_runtime_context().gcs_address, 1).level == "ok"


def test_hosts_of_the_retriever() -> None:
    found = list(
        check_hosts(f"http://127.0.0.1:8000/retrieve, http://{NOWHERE}:8000/retrieve,https://[::1]/x,retrieve")
    )
    assert [finding.level for finding in found] == ["ok", "FAIL", "ok", "FAIL"]
    assert NOWHERE in found[1].found and "retriever.url" in found[1].todo


def test_only_what_the_run_uses_is_looked_for(make_config: Callable[..., Config]) -> None:
    whats = [finding.what for finding in check_network(make_config(f"retriever.url=http://{NOWHERE}/"), None)]
    assert whats == ["ports", "ray", "retriever host"]
    own_engine = make_config("retriever.engine=some.Engine")
    without = make_config("do_search=false", "actor_rollout_ref.rollout.n_agent=1", "actor_rollout_ref.rollout.n=2")
    for config in (own_engine, without):
        assert [finding.what for finding in check_network(config, None)] == ["ports", "ray"]
