"""Sampling ahead of the loop: real threads, with the stand-ins of ahead_world.py."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ahead_world import DEADLINE_S, Engines, Prompts, World, trajectory, until
from content_scorer import ContentScorer
from run_config import run_config
from transformers import PreTrainedTokenizerFast

from verl.data.prompts import Curriculum, PromptSource
from verl.errors import EnvironmentUnavailable, WeightsInTraining, WeightSyncError
from verl.protocol import Segment, Source, Status, Trajectory
from verl.rollout.episode_queue import Group, NextGroups
from verl.trainer.sampling.collection import Collected, Collector, staleness_metrics
from verl.trainer.sampling.rollout_source import SamplingState

# Each takes milliseconds; where one hangs for ever, the others are not to add their five minutes.
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any, **options: Any) -> World:
        made.append(World(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.source.close()
    assert not any(thread.name == "rollouts-ahead" for thread in threading.enumerate()), "a thread is left"


def take_first(one: World, ready: int = 0) -> None:
    """Take step 1, when `ready` more steps are sampled and the next one is being sampled."""
    one.sampler.permits.release(1 + ready)
    one.take(1)
    for _ in range(2 + ready):
        one.sampler.wait_until_begun()


def test_one_step_off_samples_the_next_step_with_the_weights_before_the_update(world: Callable[..., World]) -> None:
    """Sampled with versions 0, 0, 1, 2: when step n is sampled, step n - 1 is being trained."""
    one = world(1, 4)
    one.sampler.permits.release()
    taken = [one.take(1)]
    for step in (1, 2, 3):
        one.sampler.wait_until_begun()
        until(lambda step=step: one.sampler.versions[-1][0] == step + 1)  # type: ignore[misc]
        one.train(step)
        one.sampler.permits.release()
        taken.append(one.take(step + 1))
    assert taken == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert one.sampler.versions == [(1, 0), (2, 0), (3, 1), (4, 2)]


def test_a_step_says_how_old_its_weights_are(world: Callable[..., World]) -> None:
    one = world(1, 2, free=True)
    first = one.take_all(1)
    until(lambda: len(one.sampler.versions) == 2)
    one.train(1)
    second = one.take_all(2)
    found = [staleness_metrics(c.sampled, step, 1) for step, c in ((1, first), (2, second))]
    assert found == [
        {"rollout/staleness/mean": 0.0, "rollout/staleness/max": 0.0},
        {"rollout/staleness/mean": 1.0, "rollout/staleness/max": 1.0},
    ]
    assert {"rollout/idle_s", "rollout/collect_s", "rollout/num_engines"} <= second.metrics.keys()
    with pytest.raises(
        WeightSyncError, match=r"step 2: 2 of 2 .* by version 0 .* only versions 1 to 1 .*max_staleness"
    ):
        staleness_metrics(second.sampled, 2, 0)


def test_the_mean_age_of_weights() -> None:
    """Step 5 trains version 4: versions 4, 3, 3, 2 are 0, 1, 1 and 2 behind."""
    found = [trajectory(5, number, version) for number, version in enumerate((4, 3, 3, 2))]
    assert staleness_metrics(found, 5, 2) == {"rollout/staleness/mean": 1.0, "rollout/staleness/max": 2.0}
    with pytest.raises(WeightSyncError, match="step 5: 1 of 1"):
        staleness_metrics([trajectory(5, 0, 5)], 5, 2)  # weights from the future


def test_no_more_is_sampled_ahead_than_the_bound_allows(world: Callable[..., World]) -> None:
    one = world(2, 9, free=True)
    one.take(1)
    until(lambda: one.sampler.versions == [(1, 0), (2, 0), (3, 0)])
    time.sleep(0.05)  # a fourth would be begun by now
    assert len(one.sampler.versions) == 3
    one.train(1)
    one.take(2)
    until(lambda: one.sampler.versions[3:] == [(4, 1)])


def test_with_a_bound_of_two_the_loop_does_not_wait_for_a_batch_that_it_does_not_need_yet(
    world: Callable[..., World],
) -> None:
    """Step 2 is ready when step 1 is trained, and step 3 is being sampled: step 2 is taken, weights come later."""
    one = world(2, 5)
    take_first(one, ready=1)
    one.train(1)
    assert one.take(2) == [2, 3] and one.rollouts.version == 0 and one.rollouts.sampling
    one.train(2)
    one.sampler.permits.release()
    assert one.take(3) == [4, 5]
    until(lambda: one.sampler.versions[3:] == [(4, 2)])  # the newest, version 1 was never loaded


@pytest.mark.parametrize("most", [1, 2, 3])
def test_whatever_takes_how_long_every_prompt_is_trained_once_and_in_order(
    world: Callable[..., World], most: int
) -> None:
    """`take` checks the bound, the stand-ins that weights change only between batches and are exported whole."""
    one, last, draw = world(most, 40, free=True), 40, random.Random(most)
    taken: list[int] = []
    for step in range(1, last + 1):
        taken += one.take(step)
        one.train(step, draw.choice([0.0, 0.001, 0.004]), hold=step % 7 == 0)
        if step % 7 == 0:
            with one.source.engines(one.timer):
                assert one.rollouts.version == step
    assert taken == list(range(2 * last))


def test_a_validation_has_the_engines_and_the_newest_weights_to_itself(world: Callable[..., World]) -> None:
    one = world(2, 5)
    take_first(one)
    one.train(1, hold=True)
    one.sampler.permits.release()
    with one.source.engines(one.timer):
        assert one.rollouts.version == 1 and not one.rollouts.sampling
        begun = len(one.sampler.versions)
        time.sleep(0.05)
        assert len(one.sampler.versions) == begun
    until(lambda: one.sampler.versions[-1] == (3, 1))


def test_a_failure_is_raised_by_the_step_that_it_belongs_to(world: Callable[..., World]) -> None:
    one = world(2, 5, free=True)
    one.sampler.failing[3] = EnvironmentUnavailable("the retriever is gone")
    one.take(1)
    one.train(1)
    assert one.take(2) == [2, 3]
    one.train(2)
    for _ in range(2):
        with pytest.raises(EnvironmentUnavailable, match="the retriever is gone"):
            one.take(3)


def test_what_collapsed_weights_sampled_is_thrown_away_and_its_prompts_are_not(world: Callable[..., World]) -> None:
    one = world(2, 6)
    take_first(one, ready=1)  # step 2 is ready, step 3 is being sampled
    one.train(1)
    one.source.discard(1, one.timer)
    one.sampler.permits.release(8)
    taken = []
    for step in range(2, 7):
        taken += one.take(step)
        one.train(step)
    assert taken == list(range(2, 12))
    assert one.sampler.versions[3] == (2, 1)


def test_the_step_that_was_being_sampled_alone_is_sampled_again(world: Callable[..., World]) -> None:
    one = world(1, 3)
    take_first(one)
    one.train(1)
    one.source.discard(1, one.timer)
    one.sampler.permits.release(2)
    assert one.take(2) == [2, 3] and (2, 1) in one.sampler.versions


def test_the_last_step_can_be_thrown_away_too(world: Callable[..., World]) -> None:
    """The thread has nothing left to sample then, and has to go back to it."""
    one = world(1, 2, free=True)
    one.take(1)
    until(lambda: len(one.sampler.versions) == 2 and not one.rollouts.sampling)
    one.train(1)
    one.source.discard(1, one.timer)
    assert one.take(2) == [2, 3] and one.sampler.versions[-1] == (2, 1)


def test_a_resumed_run_samples_again_what_was_sampled_ahead(world: Callable[..., World]) -> None:
    """Saved after step 1, while step 2 is ready and step 3 is being sampled: it goes on with the prompts of step 2."""
    one = world(2, 9)
    one.sampler.permits.release(2)
    one.take(1)
    until(lambda: len(one.sampler.versions) == 3)
    one.train(1)
    saved = one.source.state().to_json()
    assert saved["prompts"] == {"position": 2}
    assert one.take(2) == [2, 3] and one.source.state().prompts == {"position": 4}
    resumed = world(2, 9, free=True, first=1)
    SamplingState.from_json(saved).put_back(resumed.sampler.prompts)  # type: ignore[arg-type]
    assert resumed.take(2) == [2, 3] and resumed.sampler.versions[0] == (2, 1)


def test_a_reward_draws_the_same_after_a_resume(world: Callable[..., World]) -> None:
    one = world(1, 3)
    drawn: list[float] = []
    collect = one.sampler.collect
    one.sampler.collect = lambda step: (collect(step), drawn.append(random.random()))[0]  # type: ignore[method-assign]
    one.sampler.permits.release(2)
    one.take(1)
    until(lambda: len(drawn) == 2)  # step 2's
    SamplingState.from_json(one.source.state().to_json()).put_back(Prompts())  # type: ignore[arg-type]
    assert random.random() == drawn[1]


def test_before_anything_was_sampled_the_state_is_that_of_the_prompts(world: Callable[..., World]) -> None:
    one = world(1, 3)
    one.sampler.prompts.next(6)
    assert one.source.state().prompts == {"position": 6}


def test_engines_that_were_started_anew_wait_for_weights_that_are_not_in_training(world: Callable[..., World]) -> None:
    """The thread may not export them. The batch is sampled with the same prompts when the loop has loaded them, and one
    that is ready stays.
    """
    one = world(2, 4, free=True)
    collect, taken, died = one.sampler.collect, threading.Event(), threading.Event()

    def dying(step: int) -> Collected:
        collected = collect(step)
        if step == 3 and not died.is_set():
            assert taken.wait(DEADLINE_S)  # a loop that is still in `take` would load weights at once
            died.set()
            one.rollouts.publish()  # what the manager does when it has started the last engine anew
        return collected

    one.sampler.collect = dying  # type: ignore[method-assign]
    one.take(1)
    taken.set()
    assert died.wait(DEADLINE_S)
    assert one.sampler.versions == [(1, 0), (2, 0), (3, 0)]
    one.train(1)
    assert one.take(2) == [2, 3] and one.take(3) == [4, 5]
    assert one.sampler.versions[3] == (3, 1)


def test_weights_are_loaded_for_a_loop_that_waits_for_such_a_batch(world: Callable[..., World]) -> None:
    one = world(1, 2, free=True)
    one.sampler.failing[1] = WeightsInTraining("started anew")
    assert one.take(1) == [0, 1]


def test_closing_ends_a_collection(world: Callable[..., World]) -> None:
    one = world(1, 3)
    one.sampler.permits.release()
    one.take(1)
    one.sampler.wait_until_begun()
    one.source.close()
    until(lambda: not one.rollouts.sampling)


def test_the_thread_ends_by_itself_when_all_is_sampled_and_taken(world: Callable[..., World]) -> None:
    one = world(1, 2, free=True)
    for step in (1, 2):
        one.take(step)
        one.train(step, hold=step == 2)
    until(lambda: not any(thread.name == "rollouts-ahead" for thread in threading.enumerate()))
    with one.source.engines(one.timer):
        assert one.rollouts.version == 2


# A curriculum beside sampling ahead: the real prompts and the real collector.


class Playing(Engines):
    """Prompt n is always right where n is divisible by 3, until step 6; from then on the others are."""

    stats: dict[str, float] = {}

    def collect_groups(self, groups: Sequence[Group], step: int, next_groups: NextGroups) -> None:
        for group in groups:
            learned = (group.prompt.row["number"] % 3 == 0) == (step < 6)
            for place in range(2):
                policy = Segment(Source.POLICY, (2,), (-1.0,), ((self.version or 0, 1),))
                played = Trajectory(group.id, group.prompt, [Segment(Source.PROMPT, (1,)), policy], Status.ANSWERED)
                played.reward = float(learned or place)
                group.results[place] = played
        next_groups(groups, True)


class Scored(ContentScorer):
    def score_some(self, trajectories: Sequence[Trajectory]) -> None:
        pass


class Drawing(World):
    """A world whose prompts are the twelve of a file, drawn under a curriculum."""

    def __init__(self, file: str, tokenizer: PreTrainedTokenizerFast, max_staleness: int, first: int = 0) -> None:
        super().__init__(max_staleness, 14, first=first)
        often = Curriculum(keep_probability=0.25, min_keep_probability=0.05, min_prompts=4)
        self.prompts = PromptSource(file, tokenizer, max_start_length=99, seed=3, curriculum=often)
        settings = ["data.curriculum.enable=true", "data.train_batch_size=4", "actor_rollout_ref.rollout.n_agent=2"]
        required = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
        mini, estimator = "actor_rollout_ref.actor.ppo_mini_batch_size=4", "algorithm.adv_estimator=rloo"
        self.rollouts = self.source.rollouts = Playing()  # type: ignore[assignment]
        config = run_config([*settings, *required, mini, estimator])
        self.source.collector = Collector(config, self.prompts, self.rollouts, Scored())  # type: ignore[arg-type]
        self.source.load(first)

    def steps(self, first: int, last: int, draw: random.Random | None = None) -> list[list[int]]:
        """The prompts of each step, trained for so long as `draw` says."""
        taken = []
        for step in range(first, last + 1):
            taken.append(self.take(step)[::2])
            self.train(step, draw.choice([0.0, 0.001, 0.004]) if draw else 0.0)
        return taken


@pytest.fixture
def drawing(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., Drawing]]:
    row = {"data_source": "test", "reward_model": {"ground_truth": "x"}}
    rows = [row | {"prompt": [{"role": "user", "content": f"{n}?"}], "number": n} for n in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "twelve.parquet")
    made: list[Drawing] = []

    def make(*args: Any, **options: Any) -> Drawing:
        made.append(Drawing(str(tmp_path / "twelve.parquet"), byte_tokenizer, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.source.close()


@pytest.mark.parametrize("most", [1, 3])
def test_what_a_curriculum_draws_depends_on_the_step_and_not_on_the_time(
    drawing: Callable[..., Drawing], most: int
) -> None:
    """However far sampling is ahead, and however long a step takes: a step knows the rewards of all steps before it."""
    in_turn = drawing(1)
    expected = [
        [one.prompt.row["number"] for one in in_turn.source.collector.collect(step).sampled[::2]]
        for step in range(1, 15)
    ]
    assert drawing(most).steps(1, 14, random.Random(most)) == expected
    drawn = [number for numbers in expected for number in numbers]
    assert len(drawn[12:24]) > len(set(drawn[12:24])), "the second epoch was shorter"


def test_a_resumed_run_draws_what_the_curriculum_would_have_drawn(drawing: Callable[..., Drawing]) -> None:
    """Saved after each step, while further ones are sampled or ready."""
    straight, states = drawing(2), []
    expected = []
    for step in range(1, 13):
        expected += straight.steps(step, step)
        states.append(json.loads(json.dumps(straight.source.state().to_json())))
    for done in (3, 5, 8):
        resumed = drawing(2, first=done)
        SamplingState.from_json(states[done - 1]).put_back(resumed.prompts)
        assert resumed.steps(done + 1, 12) == expected[done:], f"resumed after step {done}"
