"""The server that a run starts for its reward: on GPUs of its own, asked before the first step, gone with the run."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from e2e_world import ENV, ROOT, free_port
from run_config import run_config

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards.component import ComponentReward
from search_r1.rewards.judge import Judge
from verl.config import Config, check_supported
from verl.errors import ConfigError, RewardUnavailable, WorkerError
from verl.single_controller import wait_for
from verl.single_controller.node_server import Launch, end_servers, start_server
from verl.trainer.layout import reserve_pools
from verl.trainer.reward_server import RewardServer, reserve_reward_server
from verl.trainer.sampling.scoring import Scorer
from verl.trainer.start_checks.inputs import check_parts
from verl.trainer.start_checks.resources import judge_nodes

LAUNCH = f'exec "{ROOT}/.venv/bin/python" "{ROOT}/tests/helpers/judge_server.py" 0.0.0.0 $PORT'
START_S = 120.0


class JudgeReward(ComponentReward):
    """The judge and nothing else."""

    def __init__(self, url: str, grammar: Grammar = SEARCH_R1) -> None:
        super().__init__({"judge": Judge(url, "grader", retries=0)}, grammar)

    def combine(self, values):
        return values["judge"]


def config_of(launch: str | None, *more: str, url: str = "http://{server}/v1") -> Config:
    reward = [f"reward.function={__name__}.JudgeReward", f"reward.kwargs={{url: '{url}'}}"]
    reward += [f"reward.port={free_port()}"] + ([f"reward.launch='{launch}'"] if launch else [])
    return run_config(["actor_rollout_ref.model.path=m", *reward, *more], "tinywiki")


def gpus_seen_by(server: RewardServer) -> str:
    asked = urllib.request.Request(f"http://{server.address}/v1/chat/completions", b"{}")
    [choice] = json.load(urllib.request.urlopen(asked, timeout=10))["choices"]
    return str(json.loads(choice["message"]["content"])["reason"])


def test_it_is_asked_where_it_runs_and_ends_with_the_run(ray_session: Any) -> None:
    config = config_of(LAUNCH)
    check_supported(config)
    server = RewardServer(config, reserve_reward_server(config, START_S))
    scorer = Scorer(config, None, server.address)
    with pytest.raises(RewardUnavailable, match=rf"at http://127.0.0.1:{config.reward.port}/v1 gave no verdict"):
        Scorer(config, None, f"127.0.0.1:{config.reward.port}").check()
    server.check(scorer)
    scorer.check()
    assert gpus_seen_by(server) == "", "it asked for none"
    server.close()
    with pytest.raises(RewardUnavailable, match="ClientConnectorError"):
        scorer.check()


def test_it_has_gpus_that_no_role_has(ray_session: Any) -> None:
    """Of the eight that Ray is told to have."""
    config = config_of(LAUNCH, "reward.n_gpus=2", "trainer.n_gpus_per_node=4", "trainer.device=auto")
    pools = reserve_pools(config, "cuda")
    assert pools.reward_server is not None
    [node], [trainer] = pools.reward_server.nodes, pools.training.nodes
    assert len(node.devices) == 2 and not {*node.devices} & {*trainer.devices}
    said = f"the reward's server: on GPUs {','.join(node.devices)} of {node.address}"
    assert pools.table.splitlines()[-1].strip() == said
    server = RewardServer(config, pools.reward_server)
    server.check(Scorer(config, None, server.address))
    assert gpus_seen_by(server) == ",".join(node.devices), "it sees its own alone"
    server.close()
    pools.release()


def test_gpus_that_are_not_left_are_an_error(ray_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.trainer.reward_server.JOINING_S", 1.0)
    config = config_of(LAUNCH, "reward.n_gpus=5", "trainer.n_gpus_per_node=4", "trainer.device=auto")
    with pytest.raises(WorkerError, match=r"reward.n_gpus=5 GPUs of one node in addition to those of the other roles"):
        reserve_pools(config, "cuda")
    pools = reserve_pools(config_of(None, "trainer.n_gpus_per_node=8", url="http://h/v1"), "cuda")  # all are free again
    pools.release()


def test_a_command_that_ends_is_an_error_with_its_last_words(ray_session: Any) -> None:
    config = config_of("echo no such model; exit 3")
    server = RewardServer(config, None)
    with pytest.raises(RewardUnavailable, match=r"reward.launch \(.*\) ended with status 3; .*\nno such model$"):
        server.check(Scorer(config, None, server.address))
    server.close()


def test_one_that_does_not_listen_for_others_is_an_error_that_says_so(ray_session: Any) -> None:
    told = {"name": "reward server", "setting": "reward.launch", "already": "", "unheard": "; let it listen for others"}
    launch = Launch("exec sleep 60", "127.0.0.1", free_port(), **told, error=RewardUnavailable)
    started = start_server(launch, {"num_cpus": 0}, timeout_s=1.0)
    with pytest.raises(RewardUnavailable, match=r"does not listen at \S+ after 1 s .*; let it listen for others; its"):
        wait_for([started.ready], "waiting", START_S)
    end_servers([started])


# As Ray does in the process of an actor that asks for no cores, before it makes the actor.
ONE_THREAD = """
import os, sys
from verl.errors import RewardUnavailable
from verl.single_controller.node_server import Launch, NodeServer
os.environ.setdefault("OMP_NUM_THREADS", "1")
told = {"name": "server", "setting": "reward.launch", "already": "", "unheard": "", "error": RewardUnavailable}
command = f"cd {sys.argv[1]}; env > all; mv all env; exec sleep 60"
server = NodeServer(Launch(command, "127.0.0.1", int(sys.argv[2]), **told))
while not os.path.exists(f"{sys.argv[1]}/env"):
    pass
server.end()
"""


@pytest.mark.parametrize("given", [None, "3"])
def test_it_has_all_cores_unless_the_user_said_otherwise(given: str | None, tmp_path: Path) -> None:
    env = {name: value for name, value in ENV.items() if name != "OMP_NUM_THREADS"}
    env |= {} if given is None else {"OMP_NUM_THREADS": given}
    command = [sys.executable, "-c", ONE_THREAD, str(tmp_path), str(free_port())]
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=60)
    found = [line for line in (tmp_path / "env").read_text().splitlines() if line.startswith("OMP_NUM_THREADS=")]
    assert found == ([] if given is None else [f"OMP_NUM_THREADS={given}"])


def test_before_it_is_there_arguments_are_checked_and_nobody_is_asked(prompt_file: Path, tiny_model_dir: Path) -> None:
    files = [f"data.{name}_files={prompt_file}" for name in ("train", "val")]
    files += ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    model = f"actor_rollout_ref.model.path={tiny_model_dir}"
    check_parts(config_of(LAUNCH, *files, model))
    with pytest.raises(ConfigError, match="url must look like http://host:port/v1"):
        check_parts(config_of(LAUNCH, *files, model, url="{server}"))


@pytest.mark.parametrize(
    ("launch", "url", "more", "message"),
    [
        ("serve", "http://127.0.0.1:8001/v1", (), "no argument of the reward refers to it"),
        (None, "http://{server}/v1", (), "the server of reward.launch"),
        (None, "http://h/v1", ("reward.n_gpus=1",), "reward.n_gpus=1 has no effect"),
    ],
)
def test_settings_that_make_no_sense_together(
    launch: str | None, url: str, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(launch, *more, url=url)


def test_preflight_counts_its_gpus() -> None:
    config = config_of(
        LAUNCH, "reward.n_gpus=2", "trainer.nnodes=2", "trainer.n_gpus_per_node=6", "trainer.device=auto"
    )
    assert judge_nodes(config, [8, 6], 1, "it").level == "ok"
    assert judge_nodes(config, [6, 6, 2], 1, "it").level == "ok"
    found = judge_nodes(config, [7, 7], 1, "it")
    assert found.level == "FAIL" and "and 2 of one node for the reward's server (reward.n_gpus)" in found.found
