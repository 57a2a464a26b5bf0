"""Collecting trajectories through Ray: order, seeds, redraws, errors, weights, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from weight_source import stream_of

from verl.config import Config, load_config
from verl.errors import ConfigError, EngineDied, RolloutError, SamplingAbandoned, WeightSyncError, WorkerDied
from verl.protocol import Prompt, Source, Status, Trajectory
from verl.rollout.groups import Group, groups_of
from verl.rollout.manager import RolloutManager
from verl.rollout.weight_stream import Exported, WeightStream, stream_buckets
from verl.rollout.weight_sync import open_weights
from verl.rollout.weights.exported import ExportedWeights
from verl.single_controller import ResourcePool
from verl.single_controller.sampling_nodes import SamplingNodes
from verl.trainer.roles import ActorGroup

POOL = ResourcePool(1, 1, "cpu")


def config_of(model_dir: Path, *overrides: str) -> Config:
    rollout = "actor_rollout_ref.rollout"
    return load_config(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={model_dir}",
            "agent.environment=rollout_environments.EchoEnvironment",
            "max_turns=2",
            "data.max_prompt_length=200",
            "data.max_start_length=100",
            "data.max_response_length=12",
            "data.max_obs_length=20",
            f"{rollout}.dtype=float32",
            f"{rollout}.kv_cache_gib=0.125",
            f"{rollout}.max_num_seqs=64",
            f"{rollout}.num_threads=1",
            "trainer.device=cpu",
            "trainer.step_timeout_s=400",
            *overrides,
        ],
    )


@pytest.fixture(scope="module")
def manager(ray_session: Any, tiny_model_dir: Path) -> Iterator[RolloutManager]:
    manager = RolloutManager(config_of(tiny_model_dir), POOL)
    yield manager
    manager.shutdown()


def prompts_of(tokenizer: PreTrainedTokenizerFast, *rows: dict[str, Any]) -> list[Prompt]:
    return [
        Prompt(tuple(tokenizer(f"question {index}:")["input_ids"]), "test", {"name": f"p{index}"} | row)
        for index, row in enumerate(rows)
    ]


def sampled(trajectories: list[Trajectory]) -> list[tuple[list[int], list[float]]]:
    return [(trajectory.ids, trajectory.log_probs) for trajectory in trajectories]


def test_trajectories_come_in_prompt_order_with_a_group_per_prompt(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = prompts_of(byte_tokenizer, *[{} for _ in range(5)])
    trajectories = manager.collect(prompts, n=3, step=1)
    assert [t.prompt.row["name"] for t in trajectories] == [f"p{i}" for i in range(5) for _ in range(3)]
    groups = [t.group_id for t in trajectories]
    assert len(set(groups)) == 5
    assert all(len(set(groups[3 * i : 3 * i + 3])) == 1 for i in range(5))
    assert all(t.status is Status.TURN_LIMIT and t.num_turns == 3 for t in trajectories)
    assert len({tuple(t.ids) for t in trajectories}) == 15
    assert manager.stats == {"env/failed_ratio": 0.0, "env/redraws": 0.0}


def test_what_is_drawn_depends_on_seed_and_step_and_not_on_the_company(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = prompts_of(byte_tokenizer, *[{} for _ in range(6)])
    many = manager.collect(prompts, n=2, step=3)
    assert sampled(manager.collect(prompts[:1], n=2, step=3)) == sampled(many[:2])
    assert sampled(manager.collect(prompts[:1], n=2, step=4)) != sampled(many[:2])


def test_what_another_thread_samples_can_be_abandoned(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Two of three prompts wait for others that never come; after `allow` the engines sample as before."""
    prompts = prompts_of(byte_tokenizer, *[{} for _ in range(3)])
    expected = sampled(manager.collect(prompts, n=2, step=5))
    waiting = prompts_of(byte_tokenizer, *[{"folder": str(tmp_path), "waits_for": number} for number in (0, 99, 99)])
    raised: list[BaseException] = []

    def collect() -> None:
        try:
            manager.collect(waiting, n=2, step=6)
        except SamplingAbandoned as error:
            raised.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    while not list(tmp_path.iterdir()):
        time.sleep(0.01)
    manager.abandon()
    thread.join(60)
    assert [str(error) for error in raised] == ["step 6: sampling was abandoned"]
    with pytest.raises(SamplingAbandoned):
        manager.collect(prompts, n=1, step=7)
    manager.allow()
    assert sampled(manager.collect(prompts, n=2, step=5)) == expected


def test_groups_that_are_too_slow_go_on_under_the_next_weights(
    manager: RolloutManager,
    byte_tokenizer: PreTrainedTokenizerFast,
    tiny_model_dir: Path,
    tmp_path: Path,
    weight_dir: Path,
) -> None:
    """Two of four groups wait for something that comes only after the next weights; two are enough."""
    slow = {"folder": str(tmp_path), "waits_for": 1}
    prompts = prompts_of(byte_tokenizer, {}, slow, {}, slow)
    groups = groups_of(prompts, ["train"] * 2, 6)
    complete: list[Group] = []

    def feed(more: Sequence[Group], wait: bool) -> list[Group] | None:
        complete.extend(more)
        return None if len(complete) == 2 else []

    manager.collect_groups(groups, 6, feed)
    assert sorted(group.number for group in complete) == [0, 2]
    waiting = [one for group in (groups[1], groups[3]) for one in group.begun.values()]
    assert len(waiting) == 4 and not groups[1].results
    assert all(one.status is None and one.num_turns == 1 and one.open_turn in ("stop", "length") for one in waiting)
    begun = [list(one.ids) for one in waiting]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    changed = [(name, value * 1.5) for name, value in model.named_parameters()]
    manager.load_weights(lambda: stream_of(changed, 3, weight_dir))
    (tmp_path / "news").touch()
    try:
        manager.collect_groups([groups[1], groups[3]], 7)
    finally:
        manager.load_weights(lambda: stream_of(model.named_parameters(), 0, weight_dir))
    ended = groups[1].trajectories("train") + groups[3].trajectories("train")
    assert [one.ids[: len(ids)] for one, ids in zip(ended, begun, strict=True)] == begun
    for one in ended:
        assert one.status is Status.TURN_LIMIT and one.num_turns == 3 and one.open_turn is None
        assert [version for version, _ in one.weight_versions] == [0, 3, 3] and one.weight_version == 3
        assert [event["turn"] for event in one.events] == [0, 1, 2], "a turn that was asked twice is told once"


def test_enough_groups_that_were_complete_before_need_no_engine(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    groups = groups_of(prompts_of(byte_tokenizer, {}), ["train"], 6)
    manager.collect_groups(groups, 6)
    fresh = groups_of(prompts_of(byte_tokenizer, {}, {}), ["train"], 7)
    manager.collect_groups([*groups, *fresh], 7, lambda complete, wait: None)
    assert not any(group.results or group.begun for group in fresh)


def test_validation_is_greedy(manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = prompts_of(byte_tokenizer, {})
    first, second = manager.collect(prompts, n=2, step=1, how="val")
    assert first.ids == second.ids
    assert sampled(manager.collect(prompts, n=1, step=9, how="val")) == sampled([first])


def test_context_is_what_was_sampled_and_what_the_environment_answered(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = prompts_of(byte_tokenizer, {})
    (trajectory,) = manager.collect(prompts, n=1, step=1)
    turns = [s for s in trajectory.segments if s.source is Source.POLICY]
    answers = [s for s in trajectory.segments if s.source is Source.ENVIRONMENT]
    assert [len(turns), len(answers)] == [3, 2]
    for turn, answer in zip(turns, answers, strict=False):
        text = byte_tokenizer.decode([t for t in turn.ids if t != byte_tokenizer.eos_token_id])
        assert byte_tokenizer.decode(answer.ids) == f"[{len(text)}]"


def test_failed_trajectories_are_drawn_again_with_another_seed(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    clean = prompts_of(byte_tokenizer, *[{} for _ in range(10)])
    flaky = [replace(p, row=p.row | {"name": f"flaky {i}", "failures": 2 * (i == 4)}) for i, p in enumerate(clean)]
    trajectories = manager.collect(flaky, n=1, step=5)
    assert all(t.status is Status.TURN_LIMIT for t in trajectories)
    assert manager.stats == {"env/failed_ratio": pytest.approx(2 / 12), "env/redraws": 2.0}
    undisturbed = manager.collect(clean, n=1, step=5)
    same = [a == b for a, b in zip(sampled(trajectories), sampled(undisturbed), strict=True)]
    assert same == [i != 4 for i in range(10)]


def test_what_fails_every_time_stays_failed_and_in_its_place(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"name": f"dead {i}", "failures": 99 * (i == 7)} for i in range(20)]
    trajectories = manager.collect(prompts_of(byte_tokenizer, *rows), n=1, step=6)
    assert [i for i, t in enumerate(trajectories) if t.status is Status.FAILED] == [7]
    assert trajectories[7].failure == "no answer for dead 7"
    assert manager.stats == {"env/failed_ratio": pytest.approx(3 / 22), "env/redraws": 2.0}


def test_too_many_failures_end_the_step_with_the_first_failure_text(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"name": f"down {i}", "failures": 99} for i in range(4)]
    with pytest.raises(RolloutError, match=r"2 of 2 episodes failed.*max_failed_ratio=0.2.*no answer for down"):
        manager.collect(prompts_of(byte_tokenizer, *rows), n=1, step=7)


def test_another_error_of_the_environment_ends_the_step_and_names_the_group(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(RolloutError, match=r"group train-8-1 \(test\): KeyError: 'a bug of the environment'"):
        manager.collect(prompts_of(byte_tokenizer, {}, {"bug": True}), n=1, step=8)


def test_weights_are_loaded_and_their_version_is_on_the_trajectories(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast, tiny_model_dir: Path, weight_dir: Path
) -> None:
    prompts = prompts_of(byte_tokenizer, {})
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    changed = [(name, value * 1.5) for name, value in model.named_parameters()]
    before = manager.collect(prompts, n=1, step=1)
    with pytest.raises(WeightSyncError, match="version 3: .* other values in model.norm.weight"):
        manager.load_weights(lambda: damaged(stream_of(changed, 3, weight_dir), 0))
    assert sampled(manager.collect(prompts, n=1, step=1)) == sampled(before)
    manager.load_weights(lambda: stream_of(changed, 3, weight_dir))
    after = manager.collect(prompts, n=1, step=1)
    manager.load_weights(lambda: stream_of(model.named_parameters(), 0, weight_dir))
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


def test_sleep_does_nothing_on_cpu(manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = prompts_of(byte_tokenizer, {})
    before = manager.collect(prompts, n=1, step=1)
    manager.sleep()
    manager.check()
    assert sampled(manager.collect(prompts, n=1, step=1)) == sampled(before)


def test_what_failed_is_drawn_again_while_others_are_still_played(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The first prompt waits for the second, which fails at first."""
    rows = [{"waits_for": 1}, {"failures": 1}, {}, {}, {}]
    rows = [{"name": f"met {i}", "folder": str(tmp_path)} | row for i, row in enumerate(rows)]
    rows[2:] = [{"name": f"alone {i}"} for i in range(3)]
    manager.collect(prompts_of(byte_tokenizer, *rows), n=1, step=10)
    assert manager.stats["env/redraws"] == 1


def test_an_engine_holds_as_many_episodes_as_its_cache(session: Any, tiny_model_dir: Path) -> None:
    """0.125 GiB of float32 keys and values, 3 layers of one head of 32, for sequences of 512 tokens."""
    tokens = 0.125 * 2**30 / (2 * 3 * 32 * 4)
    assert session.engine.whole_sequences == pytest.approx(tokens / 512, rel=0.02)


def test_two_engines_draw_what_one_draws_and_leave_no_process(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Also when one of them dies."""
    prompts = prompts_of(byte_tokenizer, *[{} for _ in range(4)])
    expected = manager.collect(prompts, n=2, step=2)
    before = engine_processes()
    two, one_at_once = "actor_rollout_ref.rollout.num_engines=2", "actor_rollout_ref.rollout.max_concurrent=1"
    pair = RolloutManager(config_of(tiny_model_dir, two, one_at_once), POOL)
    try:
        assert sampled(pair.collect(prompts, n=2, step=2)) == sampled(expected)
        # The first prompt lasts until six others have been played, which its own engine has no room for.
        rows = [{"folder": str(tmp_path), "waits_for": 6 * (i == 0)} for i in range(8)]
        assert len(pair.collect(prompts_of(byte_tokenizer, *rows), n=1, step=3)) == 8
        first, second = engines_besides(before, 2)
        with killed_with_requests_open(first, first):
            assert sampled(pair.collect(prompts, n=2, step=2)) == sampled(expected)
        assert pair.num_engines == 1 and second.is_running(), "the other one goes on"
        give_until(pair, 2, tiny_model_dir, weight_dir=tmp_path)
        assert sampled(pair.collect(prompts, n=2, step=2)) == sampled(expected)
        engines = engines_besides(before, 2)
        assert second in engines
    finally:
        pair.shutdown()
    for engine in engines:
        assert_gone(engine)


def give_until(manager: RolloutManager, num_engines: int, model_dir: Path, weight_dir: Path) -> None:
    """The weights that the engines have, again and again: what has started takes part from a sync on."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    deadline = time.monotonic() + 300
    while manager.num_engines < num_engines:
        assert time.monotonic() < deadline
        manager.load_weights(lambda: stream_of(model.named_parameters(), 0, weight_dir))
        time.sleep(0.5)


def test_a_sync_that_breaks_off_half_way_leaves_no_half_new_engine_in_use(
    manager: RolloutManager, byte_tokenizer: PreTrainedTokenizerFast, tiny_model_dir: Path, weight_dir: Path
) -> None:
    """First a bucket that is changed on its way, then a trainer that dies. `manager` is of no use after it."""
    prompts = prompts_of(byte_tokenizer, *[{} for _ in range(2)])
    config = config_of(tiny_model_dir, "actor_rollout_ref.rollout.weight_sync.bucket_mib=1")
    deaths = list[bool]()
    actor = ActorGroup(config, POOL, 1, False)
    pids = [ray.get(worker.__ray_call__.remote(lambda _: os.getpid())) for worker in actor.group.workers]

    def export(index: int) -> Exported:
        if index == 1:
            deaths.append(True)
            for process in [psutil.Process(pid) for pid in pids]:
                process.kill()
                assert_gone(process)  # until then it would carry out another call
        return actor.group.begin_all("export_weights", 6, "policy", index, str(weight_dir))

    def publish_and_die() -> WeightStream:
        return WeightStream(stream_buckets(export), lambda: actor.group.call_all("release_weights"))

    try:
        expected = manager.collect(prompts, n=1, step=1)
        manager.load_weights(lambda: actor.publish_weights(5))
        assert sampled(manager.collect(prompts, n=1, step=1)) == sampled(expected)
        with pytest.raises(WeightSyncError, match="version 6, bucket 2 of 2: .* found other values in"):
            manager.load_weights(lambda: damaged(actor.publish_weights(6), 1))
        with pytest.raises(WeightSyncError, match="no complete weights"):
            manager.collect(prompts, n=1, step=1)
        ray.kill(manager._fleet.engines[0].worker)
        assert sampled(manager.collect(prompts, n=1, step=1)) == sampled(expected)  # a new one, with version 5
        with pytest.raises(WorkerDied, match=r"ActorWorker\.export_weights: a worker process ended"):
            manager.load_weights(publish_and_die)
        assert deaths == [True], "the engines are not to blame, and not started anew"
        with pytest.raises(WeightSyncError, match="no complete weights"):
            manager.collect(prompts, n=1, step=1)
    finally:
        actor.shutdown()


def test_engines_that_die_are_started_anew_with_the_weights_that_they_had(
    ray_session: Any, byte_tokenizer: PreTrainedTokenizerFast, tiny_model_dir: Path, weight_dir: Path
) -> None:
    prompts = prompts_of(byte_tokenizer, *[{} for _ in range(4)])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    changed = [(name, value * 1.5) for name, value in model.named_parameters()]
    before, streams = engine_processes(), list[int]()

    def publish() -> WeightStream:
        """Its first reader dies when it has some of the buckets."""
        stream, first = stream_of(changed, 3, weight_dir, bucket_mib=0.2), not streams
        streams.append(0)

        def buckets() -> Iterator[ExportedWeights]:
            for bucket in stream.buckets:
                streams[-1] += 1
                if first and bucket.index == 2:
                    (engine,) = engines_besides(before, 1)
                    engine.kill()
                yield bucket

        return replace(stream, buckets=buckets())

    manager = RolloutManager(config_of(tiny_model_dir, "actor_rollout_ref.rollout.max_restarts=4"), POOL)
    try:
        manager.load_weights(publish)
        assert streams[0] == 3 < streams[1]
        expected = manager.collect(prompts, n=2, step=2)
        (engine,) = engines_besides(before, 1)
        with killed_with_requests_open(engine, engine):
            again = manager.collect(prompts, n=2, step=2)
        assert sampled(again) == sampled(expected) and [t.weight_version for t in again] == [3] * 8
        (engine,) = engines_besides(before, 1)
        worker = engine.parent()
        with killed_with_requests_open(worker, engine), next_worker_killed_as_it_starts():
            again = manager.collect(prompts, n=2, step=2)
        assert sampled(again) == sampled(expected) and [t.weight_version for t in again] == [3] * 8
        assert_gone(engine)  # it ends with its worker
        (engine,) = engines_besides(before, 1)
        engine.kill()
        with pytest.raises(EngineDied, match="has died"):
            manager.collect(prompts, n=2, step=2)  # the fifth time is once too often
    finally:
        manager.shutdown()


@contextlib.contextmanager
def killed_with_requests_open(process: psutil.Process, engine: psutil.Process) -> Iterator[None]:
    """Kills `process` while `engine` cannot answer: stopped beforehand, it goes on only once `process` is dead."""

    def kill() -> None:
        time.sleep(0.5)
        process.kill()
        if process != engine:
            engine.resume()

    engine.suspend()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        killer.join()


@contextlib.contextmanager
def next_worker_killed_as_it_starts() -> Iterator[None]:
    before, done = processes_of("RolloutWorker"), threading.Event()

    def kill() -> None:
        while not done.wait(0.02):
            for process in processes_of("RolloutWorker.start") - before:
                process.kill()
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        none_came = killer.is_alive()
        done.set()
        killer.join()
    assert not none_came


def test_weights_that_are_broadcast_go_another_way_when_an_engine_dies_in_between(
    ray_session: Any, byte_tokenizer: PreTrainedTokenizerFast, tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines as on a node that only samples, which here is the trainer's own."""
    prompts = prompts_of(byte_tokenizer, *[{} for _ in range(2)])
    rollout = "actor_rollout_ref.rollout"
    settings = [f"{rollout}.nnodes=1", f"{rollout}.num_engines=2", f"{rollout}.weight_sync.between_nodes=broadcast"]
    config = config_of(tiny_model_dir, "trainer.layout=split", f"{rollout}.weight_sync.bucket_mib=1", *settings)
    before = engine_processes()
    nodes = SamplingNodes(1, "cpu", taken=())
    nodes.reserve(1, timeout_s=60)
    actor = ActorGroup(config, POOL, 1, False)
    manager = RolloutManager(config, POOL, nodes)
    try:
        manager.load_weights(lambda: elsewhere(actor.publish_weights(1)))
        expected = manager.collect(prompts, n=2, step=1)
        assert {trajectory.weight_version for trajectory in expected} == {1} and not told_of_broadcasts(caplog)
        [first, _] = engines_besides(before, 2)
        manager.load_weights(lambda: killing(first, actor.publish_weights(2)))
        assert "an engine has died" in told_of_broadcasts(caplog)
        again = manager.collect(prompts, n=2, step=1)
        assert sampled(again) == sampled(expected) and {trajectory.weight_version for trajectory in again} == {2}
        caplog.clear()
        manager.load_weights(lambda: elsewhere(actor.publish_weights(3)))
        assert not told_of_broadcasts(caplog), "those that are there are a new group"
        assert sampled(manager.collect(prompts, n=2, step=1)) == sampled(expected)
    finally:
        manager.shutdown()
        actor.shutdown()
        nodes.release()


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


def test_environment_that_cannot_be_imported_is_a_config_error(ray_session: Any, tiny_model_dir: Path) -> None:
    manager = RolloutManager(config_of(tiny_model_dir, "agent.environment=no.such.Place"), POOL)
    try:
        with pytest.raises(ConfigError, match="agent.environment=no.such.Place"):
            manager.check()
    finally:
        manager.shutdown()


def engine_processes() -> set[psutil.Process]:
    """By vLLM's title, or by how Python spawns it: a title is lost where the first environment variable was changed."""
    return processes_of("EngineCore", "multiprocessing.spawn")


def engines_besides(before: set[psutil.Process], number: int) -> set[psutil.Process]:
    """Of so many processes; on a busy machine one has its title, or is gone, a while after it has answered or died."""
    deadline = time.monotonic() + 60
    while len(found := engine_processes() - before) != number:
        assert time.monotonic() < deadline, f"{len(found)} engine processes, not {number}"
        time.sleep(0.1)
    return found


def processes_of(*words: str) -> set[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return {process for process in found if any(word in _title(process) for word in words)}


def _title(process: psutil.Process) -> str:
    try:
        return process.name() + " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def assert_gone(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"still running: {process}"
        time.sleep(0.1)
