"""Collecting trajectories through Ray: order, seeds, redraws, errors, weights, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import ray
import torch
from phases import wait_for_end
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from weight_source import stream_of

from verl.config import Config, load_config
from verl.errors import ConfigError, EngineDied, RolloutError, SamplingAbandoned, WeightSyncError, WorkerDied
from verl.protocol import Prompt, Source, Status, TrainBatch, Trajectory
from verl.rollout.episode_queue import Group, groups_of
from verl.rollout.fleet import Fleet
from verl.rollout.manager import RolloutManager
from verl.rollout.weight_stream import ExportCall, WeightStream, stream_buckets
from verl.rollout.weight_sync import open_weights
from verl.rollout.worker import settings_of
from verl.single_controller import ResourcePool
from verl.single_controller.nodes import SamplingNodes
from verl.weight_sync.buckets import ExportedWeights
from verl.workers.roles import ActorGroup

POOL = ResourcePool(1, 1, "cpu")
ROLLOUT = "actor_rollout_ref.rollout"


class Weights(NamedTuple):
    own: list[tuple[str, torch.Tensor]]
    changed: list[tuple[str, torch.Tensor]]


def config_of(model_dir: Path, *overrides: str) -> Config:
    model = (f"actor_rollout_ref.model.path={model_dir}", f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.kv_cache_gib=0.125")
    lengths = ("max_prompt_length=200", "max_start_length=100", "max_response_length=12", "max_obs_length=20")
    play = (
        "agent.environment=rollout_environments.EchoEnvironment",
        "max_turns=2",
        *(f"data.{one}" for one in lengths),
    )
    machine = (f"{ROLLOUT}.max_num_seqs=64", f"{ROLLOUT}.num_threads=1", "trainer.device=cpu")
    read = f"{ROLLOUT}.load_format=auto"  # some tests sample before a trainer has sent weights
    return load_config("ppo_trainer", [*model, *(f"data.{one}" for one in lengths), *play, *machine, read, *overrides])


@pytest.fixture(scope="module")
def manager(ray_session: Any, tiny_model_dir: Path) -> Iterator[RolloutManager]:
    """Of one engine, which is gone after `shutdown`."""
    manager = RolloutManager(config_of(tiny_model_dir, f"{ROLLOUT}.max_restarts=4"), POOL)
    yield manager
    engines = [engine for _, engine in processes_of(manager)]
    manager.shutdown()
    for engine in engines:
        wait_for_end(engine.pid)


@pytest.fixture(scope="module")
def pair(ray_session: Any, tiny_model_dir: Path) -> Iterator[RolloutManager]:
    """Of two engines, one of which may die once, as on a node that only samples, which here is the trainer's own."""
    broadcast = f"{ROLLOUT}.weight_sync.between_nodes=broadcast"
    settings = (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.num_engines=2", f"{ROLLOUT}.max_concurrent=1", broadcast)
    config = config_of(tiny_model_dir, "trainer.layout=split", f"{ROLLOUT}.max_restarts=1", *settings)
    nodes = SamplingNodes(1, "cpu", taken=())
    nodes.reserve(1, timeout_s=60)
    pair = RolloutManager(config, POOL, nodes)
    yield pair
    pair.shutdown()
    nodes.release()


@pytest.fixture(scope="module")
def actor(ray_session: Any, tiny_model_dir: Path) -> Iterator[ActorGroup]:
    """A trainer of one rank, whose weights are two buckets, and whose step is one update by 32 trajectories."""
    learning = ("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    config = config_of(tiny_model_dir, f"{ROLLOUT}.weight_sync.bucket_mib=1", *learning)
    actor = ActorGroup(config, POOL, 10, False)
    yield actor
    actor.shutdown()


def prompts_of(*rows: dict[str, Any] | int) -> list[Prompt]:
    """Prompts with these rows; a number stands for so many without anything."""
    each = [row for given in rows for row in ([{}] * given if isinstance(given, int) else [given])]
    return [Prompt((40, 41, 50 + index), "test", {"name": f"p{index}"} | row) for index, row in enumerate(each)]


@pytest.fixture(scope="module")
def weights(tiny_model_dir: Path) -> Weights:
    """Those of the engines' files, and others."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    return Weights(list(model.named_parameters()), [(name, value * 1.5) for name, value in model.named_parameters()])


def sampled(trajectories: list[Trajectory]) -> list[tuple[list[int], list[float]]]:
    return [(trajectory.ids, trajectory.log_probs) for trajectory in trajectories]


def test_trajectories_come_in_prompt_order_with_a_group_per_prompt(manager: RolloutManager) -> None:
    prompts = prompts_of(5)
    trajectories = manager.collect(prompts, n=3, step=1)
    assert [t.prompt.row["name"] for t in trajectories] == [f"p{i}" for i in range(5) for _ in range(3)]
    groups = [t.group_id for t in trajectories]
    assert len(set(groups)) == 5
    assert all(len(set(groups[3 * i : 3 * i + 3])) == 1 for i in range(5))
    assert all(t.status is Status.TURN_LIMIT and t.num_turns == 3 for t in trajectories)
    assert len({tuple(t.ids) for t in trajectories}) == 15
    assert manager.stats == {"env/failed_ratio": 0.0, "env/redraws": 0.0}


def test_what_is_drawn_depends_on_seed_and_step_and_not_on_the_company(manager: RolloutManager) -> None:
    prompts = prompts_of(6)
    many = manager.collect(prompts, n=2, step=3)
    assert sampled(manager.collect(prompts[:1], n=2, step=3)) == sampled(many[:2])
    assert sampled(manager.collect(prompts[:1], n=2, step=4)) != sampled(many[:2])


def test_what_another_thread_samples_can_be_abandoned(manager: RolloutManager, tmp_path: Path) -> None:
    """Two of three prompts wait for others that never come; after `allow` the engines sample as before."""
    prompts = prompts_of(3)
    expected = sampled(manager.collect(prompts, n=2, step=5))
    waiting = prompts_of(*[{"folder": str(tmp_path), "waits_for": number} for number in (0, 99, 99)])
    with ThreadPoolExecutor(1) as other:
        collecting = other.submit(manager.collect, waiting, 2, 6)
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
        manager.abandon()
        with pytest.raises(SamplingAbandoned, match="^step 6: sampling was abandoned$"):
            collecting.result(60)
    with pytest.raises(SamplingAbandoned):
        manager.collect(prompts, n=1, step=7)
    manager.allow()
    assert sampled(manager.collect(prompts, n=2, step=5)) == expected


def test_groups_that_are_too_slow_go_on_under_the_next_weights(
    manager: RolloutManager, weights: Weights, tmp_path: Path, weight_dir: Path
) -> None:
    """Two of four groups wait for something that comes only after the next weights; two are enough. One of the two has
    state, in processes.
    """
    slow = {"folder": str(tmp_path), "waits_for": 1}
    groups = groups_of(prompts_of({}, slow, {}, slow | {"process": True}), ["train"] * 2, 6)
    complete: list[Group] = []

    def next_groups(more: Sequence[Group], wait: bool) -> list[Group] | None:
        complete.extend(more)
        return None if len(complete) == 2 else []

    manager.collect_groups(groups, 6, next_groups)
    assert sorted(group.number for group in complete) == [0, 2]
    waiting = [one for group in (groups[1], groups[3]) for one in group.begun.values()]
    assert len(waiting) == 4 and not groups[1].results
    assert all(one.status is None and one.num_turns == 1 and one.open_turn in ("stop", "length") for one in waiting)
    begun = [list(one.ids) for one in waiting]
    assert len(processes_called("counts-turns")) == 2
    manager.load_weights(lambda: stream_of(weights.changed, 3, weight_dir))
    (tmp_path / "news").touch()
    try:
        manager.collect_groups([groups[1], groups[3]], 7)
    finally:
        manager.load_weights(lambda: stream_of(weights.own, 0, weight_dir))
    ended = groups[1].trajectories("train") + groups[3].trajectories("train")
    assert [one.ids[: len(ids)] for one, ids in zip(ended, begun, strict=True)] == begun
    for one in ended:
        assert one.status is Status.TURN_LIMIT and one.num_turns == 3 and one.open_turn is None
        assert [version for version, _ in one.weight_versions] == [0, 3, 3] and one.weight_version == 3
        assert [event["turn"] for event in one.events] == [0, 1, 2], "a turn that was asked twice is told once"
    assert [len(one.sequences) for one in ended] == [1, 1, 2, 2] and not processes_called("counts-turns")


def test_enough_groups_that_were_complete_before_need_no_engine(manager: RolloutManager) -> None:
    groups = groups_of(prompts_of(1), ["train"], 6)
    manager.collect_groups(groups, 6)
    fresh = groups_of(prompts_of(2), ["train"], 7)
    manager.collect_groups([*groups, *fresh], 7, lambda complete, wait: None)
    assert not any(group.results or group.begun for group in fresh)


def test_validation_is_greedy(manager: RolloutManager) -> None:
    prompts = prompts_of(1)
    first, second = manager.collect(prompts, n=2, step=1, mode="val")
    assert first.ids == second.ids
    assert sampled(manager.collect(prompts, n=1, step=9, mode="val")) == sampled([first])


def test_context_is_what_was_sampled_and_what_the_environment_answered(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    (trajectory,) = manager.collect(prompts_of(1), n=1, step=1)
    turns = [s for s in trajectory.segments if s.source is Source.POLICY]
    answers = [s for s in trajectory.segments if s.source is Source.ENVIRONMENT]
    assert [len(turns), len(answers)] == [3, 2]
    for turn, answer in zip(turns, answers, strict=False):
        text = byte_tokenizer.decode([t for t in turn.ids if t != byte_tokenizer.eos_token_id])
        assert byte_tokenizer.decode(answer.ids) == f"[{len(text)}]"


def test_failed_trajectories_are_drawn_again_with_another_seed(manager: RolloutManager) -> None:
    clean = prompts_of(10)
    flaky = [replace(p, row=p.row | {"name": f"flaky {i}", "failures": 2 * (i == 4)}) for i, p in enumerate(clean)]
    trajectories = manager.collect(flaky, n=1, step=5)
    assert all(t.status is Status.TURN_LIMIT for t in trajectories)
    assert manager.stats == {"env/failed_ratio": pytest.approx(2 / 12), "env/redraws": 2.0}
    undisturbed = manager.collect(clean, n=1, step=5)
    same = [a == b for a, b in zip(sampled(trajectories), sampled(undisturbed), strict=True)]
    assert same == [i != 4 for i in range(10)]


def test_what_fails_every_time_stays_failed_and_in_its_place(manager: RolloutManager) -> None:
    rows = [{"name": f"dead {i}", "failures": 99 * (i == 7)} for i in range(20)]
    trajectories = manager.collect(prompts_of(*rows), n=1, step=6)
    assert [i for i, t in enumerate(trajectories) if t.status is Status.FAILED] == [7]
    assert trajectories[7].failure == "no answer for dead 7"
    assert manager.stats == {"env/failed_ratio": pytest.approx(3 / 22), "env/redraws": 2.0}


def test_too_many_failures_end_the_step_with_the_first_failure_text(manager: RolloutManager) -> None:
    rows = [{"name": f"down {i}", "failures": 99} for i in range(4)]
    with pytest.raises(RolloutError, match=r"2 of 2 episodes failed.*max_failed_ratio=0.2.*no answer for down"):
        manager.collect(prompts_of(*rows), n=1, step=7)


def test_another_error_of_the_environment_ends_the_step_and_names_the_group(manager: RolloutManager) -> None:
    with pytest.raises(RolloutError, match=r"group train-8-1 \(test\): KeyError: 'a bug of the environment'"):
        manager.collect(prompts_of({}, {"bug": True}), n=1, step=8)


def test_weights_are_loaded_and_their_version_is_on_the_trajectories(
    manager: RolloutManager, weights: Weights, weight_dir: Path
) -> None:
    prompts = prompts_of(1)
    before = manager.collect(prompts, n=1, step=1)
    with pytest.raises(WeightSyncError, match="version 3: .* rank 0 found other values in model.norm.weight float32"):
        manager.load_weights(lambda: damaged(stream_of(weights.changed, 3, weight_dir), 0))
    assert sampled(manager.collect(prompts, n=1, step=1)) == sampled(before)
    manager.load_weights(lambda: stream_of(weights.changed, 3, weight_dir))
    after = manager.collect(prompts, n=1, step=1)
    manager.load_weights(lambda: stream_of(weights.own, 0, weight_dir))
    assert (before[0].weight_version, after[0].weight_version) == (0, 3)
    assert sampled(after) != sampled(before)
    assert sampled(manager.collect(prompts, n=1, step=1)) == sampled(before)


def damaged(stream: WeightStream, index: int) -> WeightStream:
    """One bit of the last weight of a bucket changes between trainer and engine."""

    def buckets() -> Iterator[ExportedWeights]:
        for bucket in stream.buckets:
            if bucket.index == index:
                *_, weight = open_weights(bucket.exports, torch.device("cpu")).values()
                weight.view(-1).view(torch.uint8)[0] ^= 1
            yield bucket

    return replace(stream, buckets=buckets())


def test_sleep_does_nothing_on_cpu(manager: RolloutManager) -> None:
    prompts = prompts_of(1)
    before = manager.collect(prompts, n=1, step=1)
    manager.sleep()
    manager.check()
    assert sampled(manager.collect(prompts, n=1, step=1)) == sampled(before)


def test_log_probs_are_the_trainers_after_a_sync_and_a_sampler_without_it_would_be_noticed(
    manager: RolloutManager, actor: ActorGroup, weights: Weights, weight_dir: Path
) -> None:
    prompts = prompts_of(8)

    def differences(trajectories: list[Trajectory]) -> torch.Tensor:
        """|sampler - trainer|, one per policy token."""
        batch = batch_of(trajectories)
        trained_T = actor.log_probs(batch)["log_prob"]
        return (batch.tokens["rollout_log_probs"] - trained_T)[batch.tokens["loss_mask"]].abs()

    def assert_the_trainers(difference_T: torch.Tensor) -> None:
        assert len(difference_T) > 200
        assert difference_T.max() < 2e-5 and difference_T.mean() < 2e-6

    sampled = manager.collect(prompts, n=4, step=1)
    assert_the_trainers(differences(sampled))
    for version in range(1, 6):
        learn(actor, sampled)
        with pytest.raises(AssertionError):
            assert_the_trainers(differences(sampled))
        manager.load_weights(lambda version=version: actor.publish_weights(version))
        sampled = manager.collect(prompts, n=4, step=version)
        assert {trajectory.weight_version for trajectory in sampled} == {version}
        assert_the_trainers(differences(sampled))
    manager.load_weights(lambda: stream_of(weights.own, 0, weight_dir))


def batch_of(trajectories: list[Trajectory]) -> TrainBatch:
    return TrainBatch.from_trajectories([replace(trajectory, reward=0.0) for trajectory in trajectories])


def learn(actor: ActorGroup, trajectories: list[Trajectory]) -> None:
    """One update that makes every other trajectory likelier, and the rest less likely."""
    batch = batch_of(trajectories)
    batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
    sign_T = (batch.row_of_token_T % 2 * 2 - 1).float()
    batch.tokens["advantages"] = sign_T * batch.tokens["loss_mask"]
    actor.update(batch)


def test_what_failed_is_drawn_again_while_others_are_still_played(manager: RolloutManager, tmp_path: Path) -> None:
    """The first prompt waits for the second, which fails at first."""
    rows = [{"waits_for": 1}, {"failures": 1}, {}, {}, {}]
    rows = [{"name": f"met {i}", "folder": str(tmp_path)} | row for i, row in enumerate(rows)]
    rows[2:] = [{"name": f"alone {i}"} for i in range(3)]
    manager.collect(prompts_of(*rows), n=1, step=10)
    assert manager.stats["env/redraws"] == 1


def test_an_episode_whose_process_dies_is_drawn_again_and_others_do_not_notice(manager: RolloutManager) -> None:
    """64 episodes with a process each, in several sequences; of four prompts, one episode loses its process."""
    rows = [{"process": True, "name": f"process {number}"} for number in range(16)]
    whole = manager.collect(prompts_of(*rows), n=4, step=12)
    assert all(one.status is Status.TURN_LIMIT and len(one.sequences) == 2 for one in whole)
    rows = [
        row | {"failures": 1, "name": f"dies {number}"} if number % 4 == 0 else row for number, row in enumerate(rows)
    ]
    again = manager.collect(prompts_of(*rows), n=4, step=12)
    assert manager.stats["env/redraws"] == 4 and all(one.status is Status.TURN_LIMIT for one in again)
    same = [one == other for one, other in zip(sampled(whole), sampled(again), strict=True)]
    assert same.count(False) == 4 and [number // 4 for number, is_same in enumerate(same) if not is_same] == [
        0,
        4,
        8,
        12,
    ]
    assert not processes_called("counts-turns"), "every episode was closed"


def test_two_engines_draw_what_one_draws_also_when_one_of_them_dies(
    manager: RolloutManager, pair: RolloutManager, weights: Weights, tmp_path: Path, weight_dir: Path
) -> None:
    prompts = prompts_of(2, {"process": True}, {"process": True})
    expected = manager.collect(prompts, n=2, step=2)
    assert [len(one.sequences) for one in expected] == [1] * 4 + [2] * 4
    assert sampled(pair.collect(prompts, n=2, step=2)) == sampled(expected)
    # The first prompt lasts until six others have been played, which its own engine has no room for.
    rows = [{"folder": str(tmp_path), "waits_for": 6 * (i == 0)} for i in range(8)]
    assert len(pair.collect(prompts_of(*rows), n=1, step=3)) == 8
    [(worker, first), (_, second)] = processes_of(pair)
    with killed_with_requests_open(worker, first):
        assert sampled(pair.collect(prompts, n=2, step=2)) == sampled(expected)
    wait_for_end(first.pid)  # it ends with its worker
    assert pair.num_engines == 1 and second.is_running(), "the other one goes on"
    deadline = time.monotonic() + 300
    while pair.num_engines < 2:  # what has started takes part from a sync on
        assert time.monotonic() < deadline
        pair.load_weights(lambda: stream_of(weights.own, 0, weight_dir))
        time.sleep(0.5)
    assert sampled(pair.collect(prompts, n=2, step=2)) == sampled(expected)
    assert second in [engine for _, engine in processes_of(pair)]


def test_weights_that_are_broadcast_go_another_way_when_an_engine_dies_in_between(
    pair: RolloutManager, actor: ActorGroup, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of(2)
    pair.load_weights(lambda: elsewhere(actor.publish_weights(1)))
    expected = pair.collect(prompts, n=2, step=1)
    assert {trajectory.weight_version for trajectory in expected} == {1} and not told_of_broadcasts(caplog)
    [(_, first), (_, second)] = processes_of(pair)
    pair.load_weights(lambda: killing(first, actor.publish_weights(2)))
    assert "an engine has died" in told_of_broadcasts(caplog)
    again = pair.collect(prompts, n=2, step=1)
    assert sampled(again) == sampled(expected) and {trajectory.weight_version for trajectory in again} == {2}
    caplog.clear()
    pair.load_weights(lambda: elsewhere(actor.publish_weights(3)))
    assert not told_of_broadcasts(caplog), "those that are there are a new group"
    assert sampled(pair.collect(prompts, n=2, step=1)) == sampled(expected)
    assert [engine for _, engine in processes_of(pair)] == [second], "no restart is left"
    with killed_with_requests_open(second, second), pytest.raises(EngineDied, match="has died"):
        pair.collect(prompts, n=2, step=2)
    sender = actor.publish_weights(4).sender
    assert sender is not None
    sender.leave()


def elsewhere(stream: WeightStream) -> WeightStream:
    """As for engines on hosts that cannot read the trainer's memory."""
    buckets = (replace(one, exports={"elsewhere": next(iter(one.exports.values()))}) for one in stream.buckets)
    return replace(stream, buckets=buckets)


def killing(engine: psutil.Process, stream: WeightStream) -> WeightStream:
    """An engine's process ends when it has the first of the buckets."""

    def buckets() -> Iterator[ExportedWeights]:
        for bucket in stream.buckets:
            if bucket.index == 1:
                engine.kill()
                engine.wait(30)
            yield bucket

    return replace(stream, buckets=buckets())


def told_of_broadcasts(caplog: pytest.LogCaptureFixture) -> str:
    return "".join(record.getMessage() for record in caplog.records if "not by broadcast" in record.getMessage())


@pytest.mark.slow  # in the pair an engine is started anew every day, and one dies while it gets weights
def test_an_engine_that_dies_while_it_loads_is_started_anew_with_the_weights(
    ray_session: Any, tiny_model_dir: Path, weights: Weights, weight_dir: Path
) -> None:
    """What follows it dies as it starts."""
    manager, streams = RolloutManager(config_of(tiny_model_dir, f"{ROLLOUT}.max_restarts=2"), POOL), list[int]()
    prompts = prompts_of(4)
    unchanged = manager.collect(prompts, n=2, step=1)
    [(_, engine)] = processes_of(manager)

    def publish() -> WeightStream:
        """Its first reader dies when it has some of the buckets."""
        stream, first = stream_of(weights.changed, 3, weight_dir, bucket_mib=0.2), not streams
        streams.append(0)

        def buckets() -> Iterator[ExportedWeights]:
            for bucket in stream.buckets:
                streams[-1] += 1
                if first and bucket.index == 2:
                    engine.kill()
                yield bucket

        return replace(stream, buckets=buckets())

    with next_worker_killed_as_it_starts():
        manager.load_weights(publish)
    assert streams[0] == 3 < streams[1]
    changed = manager.collect(prompts, n=2, step=1)
    assert sampled(changed) != sampled(unchanged) and {one.weight_version for one in changed} == {3}
    manager.shutdown()


def test_a_sync_that_breaks_off_half_way_leaves_no_half_new_engine_in_use(
    manager: RolloutManager, actor: ActorGroup, weight_dir: Path
) -> None:
    """First a bucket that is changed on its way, then a trainer that dies. `manager` and `actor` are of no use after
    it.
    """
    prompts = prompts_of(2)
    deaths = list[bool]()
    pids = [pid_of(worker) for worker in actor.group.workers]

    def export(index: int) -> ExportCall:
        if index == 1:
            deaths.append(True)
            for process in [psutil.Process(pid) for pid in pids]:
                process.kill()
                wait_for_end(process.pid)  # until then it would carry out another call
        return actor.group.begin_all("export_weights", 6, "policy", index, str(weight_dir))

    def publish_and_die() -> WeightStream:
        return WeightStream(stream_buckets(export), lambda: actor.group.call_all("release_weights"))

    manager.load_weights(lambda: actor.publish_weights(5))
    expected = manager.collect(prompts, n=1, step=1)
    with pytest.raises(WeightSyncError, match="version 6, bucket 2 of 2: .* found other values in"):
        manager.load_weights(lambda: damaged(actor.publish_weights(6), 1))
    with pytest.raises(WeightSyncError, match="no complete weights"):
        manager.collect(prompts, n=1, step=1)
    worker = manager._fleet.engines[0].worker
    pid = pid_of(worker)
    ray.kill(worker)
    wait_for_end(pid)  # until then it would answer once more
    again = manager.collect(prompts, n=1, step=1)
    assert sampled(again) == sampled(expected) and {one.weight_version for one in again} == {5}, "a new one"
    with pytest.raises(WorkerDied, match=r"ActorWorker\.export_weights: a worker process ended"):
        manager.load_weights(publish_and_die)
    assert deaths == [True], "the engines are not to blame, and not started anew"
    with pytest.raises(WeightSyncError, match="no complete weights"):
        manager.collect(prompts, n=1, step=1)


@contextlib.contextmanager
def killed_with_requests_open(process: psutil.Process, engine: psutil.Process) -> Iterator[None]:
    """Kills `process` while `engine` cannot answer: stopped beforehand, it goes on only once `process` is dead."""

    def kill() -> None:
        time.sleep(0.5)
        process.kill()
        if process != engine:
            engine.resume()

    engine.suspend()
    with ThreadPoolExecutor(1) as killer:
        killer.submit(kill)
        yield


@contextlib.contextmanager
def next_worker_killed_as_it_starts() -> Iterator[None]:
    before, done = processes_called("RolloutWorker"), threading.Event()

    def kill() -> bool:
        while not done.wait(0.02):
            for process in processes_called("RolloutWorker.start") - before:
                process.kill()
                return True
        return False

    with ThreadPoolExecutor(1) as killer:
        killed = killer.submit(kill)
        try:
            yield
        finally:
            done.set()
    assert killed.result()


class Unstarted:
    """In the place of a worker; it only knows the seed of the engine that it would start."""

    def __init__(self, config: Config, device: str, number: int) -> None:
        self._seed = settings_of(config, 64, device, number=number).seed

    def start(self, retriever: object) -> int:
        return 1

    def seed(self) -> int:
        return self._seed


def test_no_two_engines_draw_the_same_random_numbers(
    ray_session: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is started where another died. Another run with the same seed has the same ones."""
    monkeypatch.setattr("verl.rollout.fleet.RolloutWorker", Unstarted)
    config = config_of(tiny_model_dir, f"{ROLLOUT}.num_engines=2", f"{ROLLOUT}.max_restarts=1", "trainer.seed=5")
    fleet, seeds = Fleet(config, POOL, None), set[int]()
    for _ in range(2):
        fleet.wait()
        seeds.update(fleet.ask_each("seed", dict.fromkeys(fleet.engines, ())).values())
        fleet.lose(fleet.engines[0], EngineDied("it died"))
    assert seeds == {settings_of(config, 64, "cpu", number=number).seed for number in range(3)}
    assert len(seeds) == 3
    fleet.shutdown()


def test_environment_that_cannot_be_imported_is_a_config_error(ray_session: Any, tiny_model_dir: Path) -> None:
    manager = RolloutManager(config_of(tiny_model_dir, "agent.environment=no.such.Place"), POOL)
    try:
        with pytest.raises(ConfigError, match="agent.environment=no.such.Place"):
            manager.check()
    finally:
        manager.shutdown()


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def processes_of(manager: RolloutManager) -> list[tuple[psutil.Process, psutil.Process]]:
    """A worker's and its engine's, for each engine that can be called."""
    workers = [psutil.Process(pid_of(engine.worker)) for engine in manager._fleet.engines]
    return [(worker, engine_of(worker)) for worker in workers]


def engine_of(worker: psutil.Process) -> psutil.Process:
    """By vLLM's title, or by how Python spawns it: a title is lost where the first environment variable was changed.

    On a busy machine one that has died is gone a while after it has been noticed.
    """
    deadline = time.monotonic() + 60
    while len(found := called(worker.children(), "EngineCore", "multiprocessing.spawn")) != 1:
        assert time.monotonic() < deadline, f"{len(found)} engines of a worker"
        time.sleep(0.1)
    return found.pop()


def processes_called(*words: str) -> set[psutil.Process]:
    return called(psutil.Process().children(recursive=True), *words)


def called(processes: list[psutil.Process], *words: str) -> set[psutil.Process]:
    return {process for process in processes if any(word in _title(process) for word in words)}


def _title(process: psutil.Process) -> str:
    try:
        return process.name() + " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""
