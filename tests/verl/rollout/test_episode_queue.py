"""Which engine the queue gives an interrupted episode to."""

from __future__ import annotations

import pytest

from verl.config import load_config
from verl.protocol import Prompt, Segment, Source, Trajectory
from verl.rollout.episode_queue import EpisodeQueue, Group, groups_of


def interrupted() -> tuple[Group, EpisodeQueue]:
    """Four episodes, of which two were begun at engine a, one at b, one nowhere; and the queue of the next step."""
    config = load_config("ppo_trainer", [])
    [group] = groups_of([Prompt((1,), "nq", {})], ["train"] * 4, step=1)
    queue = EpisodeQueue(config, [group], step=1)
    queue.take(4)
    for slot, engine in enumerate("abax"):
        turn = [Segment(Source.POLICY, (5,), (-1.0,), ((0, 1),))] if engine in "ab" else []
        queue.record(slot, Trajectory(group.id, group.prompt, turn, num_turns=len(turn)), engine)
    return group, EpisodeQueue(config, [group], step=2)


def test_an_engine_goes_on_with_its_own_episodes_and_takes_those_of_others_last() -> None:
    group, queue = interrupted()
    assert [request.slot for request in queue.take(2, "b")] == [1, 3]
    assert [request.slot for request in queue.take(1, "a")] == [0]
    [last] = queue.take(4, "c")
    assert last.slot == 2 and last.begun is group.begun[2], "nothing is left waiting for its engine"


def test_lost_samples_are_drawn_again_first_and_in_their_order() -> None:
    config = load_config("ppo_trainer", [])
    groups = groups_of([Prompt((1,), "nq", {})], ["train"] * 6, step=1)
    queue = EpisodeQueue(config, groups, step=1)
    assert [request.slot for request in queue.take(4)] == [0, 1, 2, 3]
    queue.return_first([3, 0, 2])
    assert [request.slot for request in queue.take(9)] == [0, 2, 3, 4, 5]


def test_the_order_of_the_queue_is_kept_among_an_engine_s_own_and_new_episodes() -> None:
    _, queue = interrupted()
    assert [request.slot for request in queue.take(4, "a")] == [0, 2, 3, 1]


@pytest.mark.parametrize(("key", "ids", "engine"), [("k", 1, "a"), ("l", 1, "b"), ("k", 2, "b")])
def test_an_engine_that_gives_an_episode_back_as_it_was_has_not_begun_it(key: str, ids: int, engine: str) -> None:
    """Interrupted again at engine b: before it had a place, or with a state or tokens of b's."""
    config = load_config("ppo_trainer", [])
    [group] = groups_of([Prompt((1,), "nq", {})], ["train"], step=1)

    def begun(key: str, ids: int) -> Trajectory:
        turn = Segment(Source.POLICY, (5,) * ids, (-1.0,) * ids, ((0, ids),))
        return Trajectory(group.id, group.prompt, [turn], num_turns=1, episode_key=key)

    EpisodeQueue(config, [group], step=1).record(0, begun("k", 1), "a")
    EpisodeQueue(config, [group], step=2).record(0, begun(key, ids), "b")
    assert group.begun_at == {0: engine}


def test_an_episode_that_began_again_and_was_interrupted_at_once_is_not_continued_from_its_old_record() -> None:
    group, queue = interrupted()
    [request] = [one for one in queue.take(4, "a") if one.slot == 0]
    assert request.begun is not None
    queue.record(0, Trajectory(group.id, group.prompt), "b")
    assert queue.request(0).begun is None
