"""Over-sampling: which groups a step takes, and that carrying over loses no prompt, repeats none and favours none."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from content_scorer import ContentScorer
from run_config import run_config
from transformers import PreTrainedTokenizerFast

from verl.config import Config
from verl.config.rules.predicates import max_staleness
from verl.data.prompts import PromptSource
from verl.protocol import Segment, Source, Status, Trajectory
from verl.rollout.episode_queue import EpisodeQueue, Group, NextGroups
from verl.trainer.sampling.collection import Collected, Collector, staleness_metrics
from verl.trainer.sampling.rollout_source import SamplingState

BATCH, PER_PROMPT, STEPS = 4, 2, 20


@cache
def config_of(*overrides: str) -> Config:
    required = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
    small = [f"data.train_batch_size={BATCH}", f"actor_rollout_ref.rollout.n_agent={PER_PROMPT}"]
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    half = "actor_rollout_ref.rollout.over_sample=0.5"
    return run_config([*required, *small, mini, half, "algorithm.adv_estimator=rloo", *overrides])


@pytest.fixture
def prompts(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Any:
    """Makes the prompts of a run, as often as it is begun: 200, of which every fifth takes ten times as long."""
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "reward_model": {"ground_truth": "x"},
            "number": number,
            "length": 10 if number % 5 == 0 else 1,
        }
        for number in range(200)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    return lambda: PromptSource(str(tmp_path / "a.parquet"), byte_tokenizer, max_start_length=99, seed=3)


class Engines:
    """A token a tick of every trajectory, of `length` in all; the same queue and records as those of real engines.

    `dies` holds ticks of the clock at which everything in progress is lost.
    """

    def __init__(self, dies: Sequence[int] = ()) -> None:
        self.version, self.clock, self.dies, self.num_sampled = 0, 0, list(dies), 0
        self.stats: dict[str, float] = {}

    def collect_groups(self, groups: Sequence[Group], step: int, next_groups: NextGroups) -> None:
        queue = EpisodeQueue(config_of(), groups, step, next_groups)
        playing: dict[int, Trajectory] = {}
        queue.settle()
        while not queue.is_enough and (queue.waiting or playing):
            for request in queue.take(len(queue.waiting)):
                begun = request.begun or Trajectory(request.group_id, request.prompt, [Segment(Source.PROMPT, (1,))])
                playing[request.slot] = begun
            self.clock += 1
            if self.clock in self.dies:
                playing.clear()
                queue.put_back()
                continue
            for slot, trajectory in list(playing.items()):
                trajectory.segments.append(Segment(Source.POLICY, (2,), (-1.0,), ((self.version, 1),)))
                trajectory.num_turns += 1
                trajectory.events.append({"milliseconds": float(self.clock)})
                self.num_sampled += 1
                if trajectory.num_turns == trajectory.prompt.row["length"]:
                    trajectory.status = Status.ANSWERED
                    queue.record(slot, playing.pop(slot))
            queue.settle(wait=not (queue.waiting or playing))
        for slot, trajectory in playing.items():
            queue.record(slot, trajectory)
        self.stats = queue.stats()


class Scorer(ContentScorer):
    """Every other prompt is useless to dynamic sampling."""

    def score_some(self, trajectories: Sequence[Trajectory]) -> None:
        for place, trajectory in enumerate(trajectories):
            trajectory.reward = float(place % 2 and trajectory.prompt.row["number"] % 2)


class Run:
    """Steps whose weights get a new version each; what was trained, by step."""

    def __init__(self, source: PromptSource, *overrides: str, dies: Sequence[int] = ()) -> None:
        self.config, self.engines = config_of(*overrides), Engines(dies)
        self.collector = Collector(self.config, source, self.engines, Scorer(), STEPS)  # type: ignore[arg-type]

    def step(self, step: int) -> Collected:
        self.engines.version = step - 1
        collected = self.collector.collect(step)
        staleness_metrics(collected.sampled, step, max_staleness(self.config))  # raises where the bound does not hold
        return collected


def numbers(collected: Collected) -> list[int]:
    return [trajectory.prompt.row["number"] for trajectory in collected.sampled[::PER_PROMPT]]


def test_the_first_complete_groups_are_taken_and_the_slow_ones_go_on_under_the_next_weights(prompts: Any) -> None:
    run = Run(prompts(), "trainer.max_staleness=9")
    resumed: list[Trajectory] = []
    for step in range(1, STEPS):
        begun = {group.id for group in run.collector.carried if group.begun}
        collected = run.step(step)
        assert len(collected.trained) == BATCH * PER_PROMPT
        resumed += [one for one in collected.trained if one.group_id in begun]
        carried = run.collector.carried
        assert collected.metrics["rollout/over_sample/carried"] == len(carried) == 2
        assert all(group.prompt.row["length"] == 10 for group in carried if not group.is_complete)
    assert resumed
    for one in resumed:
        versions = [version for version, _ in one.weight_versions]
        assert versions == sorted(versions) and len(set(versions)) > 1
        assert len(one.ids) == 11, "nothing is sampled twice, nothing is lost"


def test_the_work_of_a_step_is_what_its_engines_sampled(prompts: Any) -> None:
    """Not that of the steps in which its trajectories were begun; every turn of these is a token and a search."""
    run = Run(prompts(), "trainer.max_staleness=9")
    finished, sampled = 0, 0
    for step in range(1, STEPS + 1):
        before, clock = run.engines.num_sampled, run.engines.clock
        collected = run.step(step)
        work = collected.work
        assert work.num_policy_tokens == len(work.search_ms) == run.engines.num_sampled - before
        assert min(work.search_ms) > clock, "a search of an earlier step counted there"
        finished += sum(one.num_tokens for one in collected.sampled)
        sampled += work.num_tokens
        assert sampled >= finished
    assert sampled == finished, "in the whole run every token counts once"


def test_what_is_complete_and_not_needed_is_the_first_of_the_next_step(prompts: Any) -> None:
    run = Run(prompts())
    for step in range(1, 8):
        ahead = [group.prompt.row["number"] for group in run.collector.carried if group.is_complete]
        assert set(ahead) <= set(numbers(run.step(step)))
        if ahead:
            return
    raise AssertionError("no group was complete ahead of its step")


@pytest.mark.parametrize("most", [1, 2, 4])
def test_every_prompt_is_trained_once_however_slow_and_no_token_is_older_than_allowed(prompts: Any, most: int) -> None:
    """As many slow prompts are trained as were drawn: short answers are not favoured. `Run.step` checks the age."""
    run = Run(prompts(), f"trainer.max_staleness={most}")
    trained = [number for step in range(1, STEPS) for number in numbers(run.step(step))]
    assert run.collector.carried
    trained += numbers(run.step(STEPS))
    assert not run.collector.carried, "the last step carries nothing over"
    assert sorted(trained) == sorted(prompt.row["number"] for prompt in prompts().next(BATCH * STEPS))


def test_without_over_sampling_a_step_waits_for_all_of_its_groups(prompts: Any) -> None:
    run = Run(prompts(), "actor_rollout_ref.rollout.over_sample=0")
    expected = [prompt.row["number"] for prompt in prompts().next(BATCH * 5)]
    assert [number for step in range(1, 6) for number in numbers(run.step(step))] == expected


@pytest.mark.parametrize("seed", range(8))
def test_no_prompt_is_lost_or_repeated_at_a_resume_a_rollback_or_the_death_of_engines(prompts: Any, seed: int) -> None:
    draw = random.Random(seed)
    run = Run(prompts(), dies=[draw.randrange(60) for _ in range(5)])
    trained: list[int] = []
    for step in range(1, STEPS + 1):
        trained += numbers(run.step(step))
        if (event := draw.random()) < 0.3:
            state = json.loads(json.dumps(SamplingState.now(run.collector).to_json()))
            run = Run(prompts(), dies=[draw.randrange(60) for _ in range(5)])
            SamplingState.from_json(state).put_back(run.collector.prompts)
        elif event < 0.6:
            run.collector.forget()
            assert not run.collector.carried
    assert sorted(trained) == sorted(prompt.row["number"] for prompt in prompts().next(BATCH * STEPS))


def test_a_state_of_a_run_that_is_saved_twice_before_prompts_are_drawn_again_has_them_once(prompts: Any) -> None:
    run = Run(prompts())
    run.step(1)
    waiting = [group.prompt.row["number"] for group in run.collector.carried]
    run.collector.forget()
    state = SamplingState.now(run.collector).to_json()
    again = prompts()
    SamplingState.from_json(state).put_back(again)
    assert [prompt.row["number"] for prompt in again.next(2)] == waiting
    assert again.state_dict()["again"] == []


def test_useless_groups_are_replaced_at_once_and_the_rest_is_carried_over(prompts: Any) -> None:
    run = Run(prompts(), "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=5")
    seen: list[int] = []
    for step in range(1, STEPS + 1):
        collected = run.step(step)
        assert len(collected.trained) == BATCH * PER_PROMPT and all(
            t.prompt.row["number"] % 2 for t in collected.trained
        )
        seen += numbers(collected)
    assert len(seen) == len(set(seen))
    carried = [group.prompt.row["number"] for group in run.collector.carried]
    assert sorted(seen + carried) == sorted(prompt.row["number"] for prompt in prompts().next(len(seen + carried)))
