"""A step in which a retriever's faults cost trajectories trains, bit by bit, as if these had never been sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chaos_world import RIVERS, assert_no_error_text, lines_about, make_environment, make_prompt, play
from engine_state import gradients
from fault_proxy import FaultProxy, Kind, Request, Rule
from transformers import AutoModelForTokenClassification

from verl.config import Config, load_config
from verl.engine.batching import RankValues, merge_rows
from verl.engine.device.runtime import init_process_group
from verl.engine.policy_engine import PolicyEngine
from verl.engine.value_engine import ValueEngine
from verl.protocol import Prompt, Status, TrainBatch
from verl.rollout.episode_queue import Group, NextGroups
from verl.tracking.spans import Timer
from verl.trainer.estimates import Estimator, for_critic
from verl.trainer.metrics.batch import step_metrics
from verl.trainer.sampling.collection import Collected, Collector
from verl.trainer.sampling.scoring import Scorer

CPU = torch.device("cpu")
REWARDS = [(1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 0, 1), (0, 1, 0, 1)]
LOST = {(1, 0): "garbage", (1, 3): "truncated_json", (2, 0): "garbage", (2, 1): "garbage", (2, 2): "truncated_json"} | {
    (3, sample): "garbage" for sample in range(4)
}
"""Which samples of which prompts fail: of group 0 none, of 1 a half, of 2 all but one, of 3 all."""
# (1 - 1/4) / std with std = sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5; (1 - 1/2) / sqrt(0.5); the only one left: 0
ADVANTAGES = [1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5), 0.0]
Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    init_process_group(0, 1, f"file://{tmp_path_factory.mktemp('group') / 'store'}", CPU)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def critic_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a critic whose values are not 0."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = AutoModelForTokenClassification.from_pretrained(tiny_model_dir, num_labels=1)
        torch.nn.init.normal_(critic.score.weight, std=0.1)
    folder = tmp_path_factory.mktemp("critic")
    critic.save_pretrained(folder)
    return folder


def make_config(model: Path, critic: Path, run_dir: Path, estimator: str) -> Config:
    paths = (f"actor_rollout_ref.model.path={model}", f"critic.model.path={critic}")
    files = ("data.train_files=a.parquet", "data.val_files=b.parquet", f"trainer.default_local_dir={run_dir}")
    sizes = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n_agent=4")
    actor = ("ppo_mini_batch_size=16", "use_dynamic_bsz=true", "ppo_max_token_len_per_gpu=600", "entropy_coeff=0.01")
    anchor = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1")
    overrides = (*paths, *files, *sizes, *anchor, *(f"actor_rollout_ref.actor.{setting}" for setting in actor))
    return load_config("ppo_trainer", [*overrides, f"algorithm.adv_estimator={estimator}", "trainer.device=cpu"])


class Episodes:
    """Real episodes of a scripted policy, in place of the engines: each searches twice and answers by `REWARDS`."""

    def __init__(self, url: str, tokenizer: Any) -> None:
        self.url, self.tokenizer = url, tokenizer
        self.stats: dict[str, float] = {}

    def collect_groups(self, groups: Sequence[Group], step: int, next_groups: NextGroups) -> None:
        slots = [(group.number, sample) for group in groups for sample in range(len(group.modes))]
        scripts = [
            lines_about(f"river {RIVERS[group]}", query_of(group, sample), answer="xy"[1 - REWARDS[group][sample]])
            for group, sample in slots
        ]
        found = play(make_environment(self.url, self.tokenizer), self.tokenizer, scripts)
        failed = sum(trajectory.status is Status.FAILED for trajectory in found)
        self.stats = {"env/failed_ratio": failed / len(found), "env/redraws": 0.0}
        for trajectory, (group, sample) in zip(found, slots, strict=True):
            groups[group].results[sample] = replace(trajectory, group_id=groups[group].id)
        assert next_groups(groups, True) is None


class Prompts:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def next(self, n: int) -> list[Prompt]:
        return [make_prompt(self.tokenizer) for _ in range(n)]


def query_of(group: int, sample: int) -> str:
    """The second search of a slot: its number is in no passage, so it finds the river's."""
    return f"river {RIVERS[group]} {group}{sample}"


def losing() -> Rule:
    """`LOST` for ever; every other second search meets something that passes, once."""
    faults = {query_of(*slot): kind for slot, kind in LOST.items()}
    asked: Counter[str] = Counter()
    passing: list[Kind] = ["error_500", "reset", "cut", "delay"]

    def rule(request: Request) -> Kind:
        (query,) = request.queries
        asked[query] += 1
        if query in faults:
            return faults[query]
        number = query.split()[-1]
        return passing[int(number[1])] if number.isdigit() and asked[query] == 1 else "none"

    return rule


class Role:
    """An engine of this process where the driver has a group of workers."""

    def __init__(self, engine: Any, config: Config) -> None:
        self.engine, self.config = engine, config

    def log_probs(self, batch: TrainBatch, of: str = "policy", top_k: int = 0) -> dict[str, torch.Tensor]:
        return merged(batch, self.engine.log_probs(batch, self.config.actor_rollout_ref.rollout.temperature, of, top_k))

    def values(self, batch: TrainBatch) -> torch.Tensor:
        return merged(batch, self.engine.values(batch))["value"]

    def begin_values(self, batch: TrainBatch) -> Callable[[], torch.Tensor]:
        return partial(self.values, batch)


def merged(batch: TrainBatch, found: RankValues) -> dict[str, torch.Tensor]:
    return {name: merge_rows(batch.lengths_B, [(found.rows, value)]) for name, value in found.tokens.items()}


class Trainer:
    """What a step does with a collected batch, without Ray: estimates, then the gradient of actor and critic."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.actor = PolicyEngine(config, CPU, 10, with_anchor=True)
        self.critic = ValueEngine(config, CPU, 10) if config.algorithm.adv_estimator == "gae" else None

    def gradients(self, batch: TrainBatch) -> Gradients:
        """Adds the estimates to `batch`. By parameter name, the critic's with `critic.` before it."""
        critic: Any = None if self.critic is None else Role(self.critic, self.config)
        actor: Any = Role(self.actor, self.config)
        Estimator(self.config).prepare(batch, actor, critic, Timer())
        found = gradients(self.actor, batch)
        if self.critic is not None:
            of_critic = gradients(self.critic, for_critic(batch, self.config.algorithm))
            found |= {f"critic.{name}": gradient for name, gradient in of_critic.items()}
        return found


def collect(config: Config, url: str, tokenizer: Any) -> Collected:
    prompts: Any = Prompts(tokenizer)
    rollouts: Any = Episodes(url, tokenizer)
    return Collector(config, prompts, rollouts, Scorer(config, tokenizer)).collect(1)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_gradient_is_that_of_the_survivors(
    estimator: str, library_url: str, byte_tokenizer: Any, tiny_model_dir: Path, critic_dir: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_model_dir, critic_dir, tmp_path, estimator)
    with FaultProxy(library_url, losing()) as proxy:
        disturbed = collect(config, proxy.url, byte_tokenizer)
    assert proxy.count("garbage", "truncated_json") == len(LOST) == 9, "the client asked again, or not at all"
    assert proxy.count("error_500", "reset", "cut", "delay") == 16 - 9
    check_counters(disturbed, byte_tokenizer)

    undisturbed = collect(config, library_url, byte_tokenizer)
    assert [t.reward for t in undisturbed.sampled] == [reward for group in REWARDS for reward in group]
    kept = [t.status is not Status.FAILED for t in disturbed.sampled]
    survivors = [t for t, survived in zip(undisturbed.sampled, kept, strict=True) if survived]
    alone = TrainBatch.from_trajectories(survivors)

    trainer = Trainer(config)
    found, expected = trainer.gradients(disturbed.batch), trainer.gradients(alone)
    assert disturbed.batch.tokens.keys() == alone.tokens.keys()
    assert all(torch.equal(disturbed.batch.tokens[name], alone.tokens[name]) for name in alone.tokens)
    assert found.keys() == expected.keys() and any(name.startswith("critic.") for name in found) == (estimator == "gae")
    assert all(value.dtype == torch.float32 and torch.equal(found[name], value) for name, value in expected.items())
    # ... and it could have differed: with the failed ones in it, it does, in every parameter
    others = trainer.gradients(undisturbed.batch)
    assert not any(torch.equal(found[name], others[name]) for name in found)
    if estimator == "grpo":
        last_B = disturbed.batch.lengths_B.cumsum(0) - 1  # the answer's last token
        advantages = disturbed.batch.tokens["advantages"][last_B].tolist()
        assert advantages == pytest.approx(ADVANTAGES, rel=1e-4, abs=0)


def check_counters(collected: Collected, tokenizer: Any) -> None:
    """Nine of sixteen failed: they are counted, and are in nothing else that is."""
    assert len(collected.sampled) == 16 and len(collected.trained) == len(collected.batch) == 7
    for number, trajectory in enumerate(collected.sampled):
        assert_no_error_text(trajectory, tokenizer)
        lost = divmod(number, 4) in LOST
        assert (trajectory.status is Status.FAILED) == (trajectory.reward is None) == lost
        assert (trajectory.num_turns, trajectory.num_searches) == ((2, 1) if lost else (3, 2))
    assert collected.batch.rows["group"].tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert collected.metrics["env/failed_ratio"] == 9 / 16
    metrics = step_metrics(collected.sampled, collected.batch)
    assert metrics["env/failed_ratio"] == 9 / 16 and metrics["env/finish_ratio"] == 1
    assert metrics["env/number_of_valid_search"] == 2 and metrics["env/number_of_actions/min"] == 3
    assert metrics["critic/score/mean"] == 3 / 7  # rewards 1 0 0 0, 1 0, 1
