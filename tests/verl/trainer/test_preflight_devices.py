"""The devices that preflight counts are those that the run would be given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from e2e_world import ENV

from verl.config import Config
from verl.trainer.preflight.devices import check_devices, judge_nodes

JOIN = """
import sys
from verl.trainer.preflight.devices import gpus_of_cluster
print(gpus_of_cluster(sys.argv[1]))
"""


def test_on_this_machine(make_config: Callable[..., Config]) -> None:
    asked = make_config("trainer.device=cuda", "trainer.n_gpus_per_node=4")
    assert check_devices(asked, None, here=4, cores=1).level == "ok"
    assert check_devices(asked, "local", here=2, cores=8).level == "FAIL"
    assert check_devices(make_config("trainer.n_gpus_per_node=4"), None, here=0, cores=2).level == "warn"


def test_a_driver_without_gpus_asks_the_cluster(ray_session: Any, make_config: Callable[..., Config]) -> None:
    address = ray_session.get_runtime_context().gcs_address  # a cluster with eight GPUs on one node
    asked = make_config("trainer.device=cuda", "trainer.n_gpus_per_node=8")
    assert check_devices(asked, address, here=0, cores=1).level == "ok"
    more = check_devices(make_config("trainer.device=auto", "trainer.n_gpus_per_node=9"), address, here=16, cores=16)
    assert more.level == "FAIL" and f"the Ray cluster {address} has 8" in more.found


def test_a_cluster_is_joined_and_left(ray_session: Any) -> None:
    address = ray_session.get_runtime_context().gcs_address
    joined = [sys.executable, "-c", JOIN, address]
    ran = subprocess.run(
        joined, env=ENV | {"RAY_AUTH_MODE": "token"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.stdout.splitlines()[-1:] == ["[8]"], ran.stderr


def test_every_node_has_to_have_enough(make_config: Callable[..., Config]) -> None:
    two = make_config("trainer.device=cuda", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    assert judge_nodes(two, [0, 8, 8], 1, "it").level == "ok"  # a head that only drives
    found = judge_nodes(two, [8, 4, 4], 64, "it")
    assert found.level == "FAIL" and "it has 8, 4, 4" in found.found


def test_the_critic_s_gpus_are_among_those_of_a_node(make_config: Callable[..., Config]) -> None:
    own = ("critic.n_gpus_per_node=2", "algorithm.adv_estimator=gae")
    two = make_config("trainer.device=cuda", "trainer.n_gpus_per_node=8", "trainer.nnodes=2", *own)
    found = judge_nodes(two, [8, 8], 1, "it")
    assert found.level == "ok"
    assert "8 GPUs on 2 node(s) are required, 2 of each node that trains for the critic alone; it has" in found.found


def test_a_cluster_that_nobody_has_named_yet_is_not_this_machine(make_config: Callable[..., Config]) -> None:
    two = make_config("trainer.device=cuda", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    found = check_devices(two, None, here=0, cores=1)
    assert found.level == "ok" and "when the run starts" in found.found


def test_a_cluster_that_does_not_answer_is_a_warning(make_config: Callable[..., Config], monkeypatch: Any) -> None:
    import ray

    def refuse(**_: Any) -> None:
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    found = check_devices(make_config("trainer.device=cuda"), "192.0.2.1:6379", here=8, cores=1)
    assert found.level == "warn" and "nobody listens" in found.found
