"""Metrics of a step, its speed and the waits in it, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sequences import in_sequences
from transformers import Qwen2Config, Qwen3MoeConfig

from verl.config import Config
from verl.engine.files.loading import ModelShape, model_shape, policy_shape
from verl.engine.model import CausalLm
from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.rollout.episode_queue import Group
from verl.tracking.spans import Span
from verl.trainer.metrics.batch import environment_metrics, step_metrics, validation_metrics
from verl.trainer.metrics.performance import (
    Utilisation,
    WorkOfStep,
    idle_metrics,
    retriever_metrics,
    throughput_metrics,
)
from verl.trainer.sampling import rollouts_ahead
from verl.trainer.sampling.rollouts_ahead import IdleClock


def policy(*ids: int) -> Segment:
    return Segment(Source.POLICY, ids, tuple(-0.5 for _ in ids))


def test_calls_of_chat_models_are_counted_by_how_they_ended(
    answered: Trajectory, wandered: Trajectory, failed: Trajectory
) -> None:
    def call(parsed: str, **run: str) -> dict[str, str]:
        return {"parsed": parsed, **run}

    none = {name for name in step_metrics([answered, wandered], None) if name.startswith("agent/")}
    assert none == set()
    answered.events = [
        {"calls": [call("ok", status="ok"), call("ok", status="timeout"), call("unclosed")]},
        {"calls": [], "action": "answer"},
    ]
    wandered.events = [{"calls": [call("ok", status="ok")]}, {"calls": [call("ok", status="error"), call("ok")]}, {}]
    failed.events = [{"calls": [call("ok", status="ok")]}]
    metrics = step_metrics([answered, wandered, failed], None)
    expected = {"ok": 1.0, "timeout": 0.5, "unclosed": 0.5, "error": 0.5, "not_run": 0.5}
    zeros = ("invalid_json", "missing_name", "unknown_tool", "invalid_arguments")
    expected |= dict.fromkeys(zeros, 0.0)
    assert metrics.pop("agent/parallel_calls") == pytest.approx(2 / 3)  # 3, 1 and 2 calls; the other turns have none
    prefix = "agent/call_status/"
    assert {name.removeprefix(prefix): value for name, value in metrics.items() if name[:6] == "agent/"} == expected


def test_turns_with_several_calls_are_counted_by_data_source(answered: Trajectory, wandered: Trajectory) -> None:
    assert not [name for name in validation_metrics([answered, wandered]) if "parallel" in name]
    answered.events = [{"calls": [{}, {}]}, {"calls": []}]
    wandered.events = [{"calls": [{}]}, {"calls": [{}, {}, {}]}, {"calls": [{}]}]
    metrics = validation_metrics([answered, wandered])
    sources = [one.prompt.data_source for one in (answered, wandered)]
    expected = {sources[0]: 1.0, sources[1]: 1 / 3, "mean": 0.5}
    assert {name: metrics[f"val/parallel_calls/{name}"] for name in expected} == pytest.approx(expected)


def environment(*ids: int) -> Segment:
    return Segment(Source.ENVIRONMENT, ids)


def trajectory(source: str, status: Status, reward: float | None, *segments: Segment, **counts: int) -> Trajectory:
    prompt_ids = (1, 2, 3) if source == "one" else (1, 2, 3, 4, 5)
    return Trajectory(
        "group",
        Prompt(prompt_ids, source, {}),
        [Segment(Source.PROMPT, prompt_ids), *segments],
        status,
        reward=reward,
        **counts,
    )


@pytest.fixture
def answered() -> Trajectory:
    """3 prompt + 2 policy + 4 retrieved + 3 policy = 12 tokens."""
    segments = (policy(10, 11), environment(20, 21, 22, 23), policy(12, 13, 14))
    return trajectory("one", Status.ANSWERED, 1.0, *segments, num_turns=2, num_valid_actions=2, num_searches=1)


@pytest.fixture
def wandered() -> Trajectory:
    """5 prompt + 1 policy + 2 feedback + 1 policy + 2 retrieved + 1 policy = 12 tokens, one invalid action of three."""
    segments = (policy(10), environment(30, 31), policy(11), environment(20, 21), policy(12))
    return trajectory("two", Status.TURN_LIMIT, 0.0, *segments, num_turns=3, num_valid_actions=2, num_searches=1)


@pytest.fixture
def failed() -> Trajectory:
    """7 sampled tokens that cost time and count in no mean."""
    return trajectory("two", Status.FAILED, None, policy(*range(40, 47)), num_turns=1, num_valid_actions=1)


@pytest.fixture
def batch(answered: Trajectory, wandered: Trajectory) -> TrainBatch:
    batch = TrainBatch.from_trajectories([answered, wandered])
    mask_T = batch.tokens["loss_mask"]
    # 5 policy tokens of advantage 0.6, then 3 of -1; huge values elsewhere must not be seen.
    batch.tokens["advantages"] = torch.full((24,), 1e6)
    batch.tokens["advantages"][mask_T] = torch.tensor([0.6] * 5 + [-1.0] * 3)
    return batch


def test_environment_counts_leave_out_the_failed(
    answered: Trajectory, wandered: Trajectory, failed: Trajectory
) -> None:
    metrics = step_metrics([answered, wandered, failed], None)
    assert metrics["env/number_of_actions/mean"] == 2.5
    assert metrics["env/number_of_actions/max"] == 3
    assert metrics["env/number_of_actions/min"] == 2
    assert metrics["env/finish_ratio"] == 0.5
    assert metrics["env/number_of_valid_action"] == 2.0
    assert metrics["env/ratio_of_valid_action"] == pytest.approx((2 / 2 + 2 / 3) / 2)
    assert metrics["env/number_of_valid_search"] == 1.0
    assert metrics["env/failed_ratio"] == pytest.approx(1 / 3)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/score/max"] == 1.0
    assert metrics["critic/score/min"] == 0.0


def test_lengths(answered: Trajectory, wandered: Trajectory, failed: Trajectory) -> None:
    wandered.status = Status.LENGTH_LIMIT
    metrics = step_metrics([answered, wandered, failed], None, max_prompt_length=5)
    assert [metrics[f"response_length/{s}"] for s in ("mean", "max", "min")] == [8.0, 9.0, 7.0]
    assert [metrics[f"policy_length/{s}"] for s in ("mean", "max", "min")] == [4.0, 5.0, 3.0]
    assert [metrics[f"prompt_length/{s}"] for s in ("mean", "max", "min")] == [4.0, 5.0, 3.0]
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/clip_ratio"] == 0.5


def test_token_means_are_over_policy_tokens(answered: Trajectory, wandered: Trajectory, batch: TrainBatch) -> None:
    metrics = step_metrics([answered, wandered], batch)
    assert metrics["critic/advantages/mean"] == pytest.approx((5 * 0.6 - 3 * 1.0) / 8, abs=1e-7)
    assert metrics["critic/advantages/max"] == pytest.approx(0.6)
    assert metrics["critic/advantages/min"] == -1.0
    assert metrics["critic/rewards/mean"] == 0.5  # no KL in the reward: the score itself
    assert metrics["state_tokens/total"] == 8
    assert metrics["state_tokens/coverage"] == pytest.approx(8 / 16)
    assert "critic/values/mean" not in metrics


@pytest.mark.parametrize(
    ("left_out", "trained"),
    [
        ((), 8),
        (range(12, 24), 5),  # the second trajectory, as one that algorithm.filter_overlong leaves out of the losses
        ((3, 4), 6),  # the first turn of the first trajectory, as rejected tokens
        ((9, 10, 11), 5),  # its last turn, where its reward is
    ],
)
def test_what_is_left_out_of_the_losses_is_still_part_of_the_response(
    answered: Trajectory, wandered: Trajectory, batch: TrainBatch, left_out: Sequence[int], trained: int
) -> None:
    """Of 9 + 7 response tokens 5 + 3 are the policy's. Rewards less a KL of 0.1 at each: 1 - 0.5 and -0.3."""
    policy_T = batch.tokens["loss_mask"].clone()
    batch.tokens["rewards"] = torch.where(policy_T, -0.1, 0.0)
    batch.tokens["rewards"][11] += 1.0
    batch.tokens["loss_mask"][list(left_out)] = False
    metrics = step_metrics([answered, wandered], batch, policy_T=policy_T)
    assert metrics["state_tokens/total"] == trained
    assert metrics["state_tokens/coverage"] == pytest.approx(trained / 16)
    assert metrics["critic/rewards/mean"] == pytest.approx((0.5 - 0.3) / 2)


def test_metrics_of_tokens_are_those_of_plain_numbers() -> None:
    """Rows of random masks against Python's own sums, token by token."""
    generator = torch.Generator().manual_seed(3)
    lengths = [7, 1, 30, 12, 400]
    total = sum(lengths)
    mask_T = torch.rand(total, generator=generator) < 0.4
    advantage_T = torch.randn(total, generator=generator)
    tokens = {"ids": torch.zeros(total, dtype=torch.int64), "loss_mask": mask_T, "advantages": advantage_T}
    batch = TrainBatch(torch.tensor(lengths), tokens, {"reward": torch.tensor([0.1, 0.7, -0.2, 0.3, 0.5])})
    metrics = step_metrics([], batch)
    numbers = [value for value, kept in zip(advantage_T.tolist(), mask_T.tolist(), strict=True) if kept]
    assert metrics["critic/advantages/mean"] == pytest.approx(math.fsum(numbers) / len(numbers), rel=1e-12)
    assert metrics["critic/advantages/max"] == max(numbers)
    assert metrics["critic/advantages/min"] == min(numbers)
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(batch.rows["reward"].tolist()) / 5, rel=1e-12)
    rows, start, num_response = mask_T.tolist(), 0, 0
    for length in lengths:
        row, start = rows[start : start + length], start + length
        num_response += length - row.index(True) if True in row else 0
    assert metrics["state_tokens/coverage"] == sum(rows) / num_response


def test_rewards_after_kl_and_explained_variance(answered: Trajectory, wandered: Trajectory, batch: TrainBatch) -> None:
    mask_T = batch.tokens["loss_mask"]
    batch.tokens["rewards"] = torch.full((24,), -0.1)
    batch.tokens["rewards"][11] = 0.9  # the last token of the first row: 1 - 0.1
    batch.tokens["returns"] = torch.full((24,), 50.0)
    batch.tokens["values"] = torch.full((24,), -50.0)
    batch.tokens["returns"][mask_T] = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    batch.tokens["values"][mask_T] = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
    metrics = step_metrics([answered, wandered], batch)
    assert metrics["critic/rewards/max"] == pytest.approx(0.5)  # 1 - 5 policy tokens x 0.1
    assert metrics["critic/rewards/min"] == pytest.approx(-0.3)
    assert metrics["critic/returns/mean"] == pytest.approx(0.5)
    assert metrics["critic/values/mean"] == pytest.approx(0.375)
    # Var(returns) = 1/4; the error is 1 on one of 8: Var = 1/8 - 1/64 = 7/64; 1 - (7/64) / (1/4) = 9/16
    assert metrics["critic/vf_explained_var"] == pytest.approx(9 / 16, abs=1e-6)


def test_tokens_per_worker_before_and_after_balancing(answered: Trajectory, wandered: Trajectory) -> None:
    batch = TrainBatch.from_trajectories([answered, wandered, answered, wandered])
    batch.lengths_B = torch.tensor([18, 14, 10, 6])
    metrics = step_metrics([answered, wandered], batch, partitions=[[0, 3], [1, 2]])
    assert metrics["global_seqlen/max"] == 32
    assert metrics["global_seqlen/min"] == 16
    assert metrics["global_seqlen/minmax_diff"] == 16
    assert metrics["global_seqlen/balanced_max"] == metrics["global_seqlen/balanced_min"] == 24
    assert metrics["global_seqlen/mean"] == 24
    assert "global_seqlen/mean" not in step_metrics([answered, wandered], batch), "of how many ranks?"


def test_time_per_token(answered: Trajectory, wandered: Trajectory, failed: Trajectory, batch: TrainBatch) -> None:
    seconds = {"gen": 0.3, "update_actor": 0.48, "save_checkpoint": 2.0}
    metrics = step_metrics([answered, wandered, failed], batch, seconds=seconds)
    assert metrics["timing_s/gen"] == 0.3
    assert metrics["timing_s/save_checkpoint"] == 2.0
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(20.0)  # 300 ms over 5 + 3 + 7 sampled tokens
    of_this_step = step_metrics([answered, wandered, failed], batch, seconds=seconds, num_sampled_tokens=6)
    assert of_this_step["timing_per_token_ms/gen"] == pytest.approx(50.0)  # 9 of them are of earlier steps
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(20.0)  # 480 ms over 24 tokens of the batch
    assert "timing_per_token_ms/save_checkpoint" not in metrics


def test_a_step_in_which_all_failed_has_no_means(failed: Trajectory) -> None:
    assert step_metrics([failed], None) == {"env/failed_ratio": 1.0}


def test_a_finished_trajectory_needs_a_reward(answered: Trajectory) -> None:
    answered.reward = None
    with pytest.raises(ValueError, match="no reward"):
        step_metrics([answered], None)


def test_validation_by_source(answered: Trajectory, wandered: Trajectory, failed: Trajectory) -> None:
    metrics = validation_metrics([answered, answered, wandered, failed], prefix="test")
    assert metrics["test/test_score/one"] == 1.0
    assert metrics["test/test_score/two"] == 0.0
    assert metrics["test/test_score/mean"] == pytest.approx(2 / 3)  # over questions, not over sources
    assert metrics["test/num_questions/one"] == 2
    assert metrics["test/num_questions/two"] == 1
    assert metrics["test/num_questions"] == 3
    assert metrics["test/searches_per_question/mean"] == 1.0
    assert metrics["test/finish_ratio/mean"] == pytest.approx(2 / 3)
    assert metrics["test/failed_ratio"] == 0.25


def test_validation_in_which_all_failed(failed: Trajectory) -> None:
    metrics = validation_metrics([failed])
    assert metrics == {"val/num_questions": 0.0, "val/failed_ratio": 1.0}
    assert all(math.isfinite(value) for value in metrics.values())


SHAPES = Path(__file__).parent / "shapes"


def test_throughput_is_by_second_and_device() -> None:
    found = throughput_metrics(6000, 12.0, 4)
    assert found == {"perf/total_num_tokens": 6000, "perf/time_per_step": 12, "perf/throughput": 125}


def test_idle_time_of_two_engines_and_a_rank() -> None:
    step = [Span("step", 0, 20)]
    engines = {
        # Samples for 6 of the 8 seconds in which it has episodes.
        "engine 0": [Span("rollouts", 1, 9), Span("generate", 1, 4), Span("generate", 6, 9), Span("wait", 4, 6)],
        # Samples for 4 of 4 seconds.
        "engine 1": [Span("rollouts", 2, 6), Span("generate", 2, 6)],
    }
    found = idle_metrics(step, engines, {"actor 0": [Span("update", 10, 15), Span("log_probs", 9, 10)]})
    assert found == {
        "perf/engine_idle_share": pytest.approx((14 / 20 + 16 / 20) / 2),
        "perf/rollout_idle_share": pytest.approx((2 / 8 + 0) / 2),
        "perf/driver_share": pytest.approx((1 + 5) / 20),  # before 1, and after 15
    }


def test_an_engine_that_had_no_episode_was_idle_all_the_time() -> None:
    found = idle_metrics([Span("step", 0, 10)], {"engine 0": []}, {})
    assert found == {"perf/engine_idle_share": 1.0, "perf/driver_share": 1.0}


def test_utilisation_by_hand() -> None:
    """10 parameters of which 2 are only looked up, 3 layers, hidden 4: rows of 2 and 5 tokens, twice."""
    shape = ModelShape(10, 3, 4, 16, 4, None, num_looked_up=2)
    utilisation = Utilisation(shape, epochs=2, promised_flops=1000.0)
    dense = 6 * 8 * (2 + 5)
    attention = 12 * 3 * 4 * (2 * 2 + 5 * 5) / 2
    assert utilisation.flops(torch.tensor([2, 5])) == 2 * (dense + attention)
    assert utilisation.metrics(torch.tensor([2, 5]), 4.0) == {"perf/mfu/actor": 2 * (dense + attention) / 4 / 1000}


def test_experts_and_wide_heads_by_hand(tmp_path: Path) -> None:
    """2 of 8 experts are chosen, whose matrices have 3 x 4 x 6 numbers; 2 heads of 8 are wider than the hidden 4."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "intermediate_size": 6}
    sizes = {"vocab_size": 10, "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=3).save_pretrained(tmp_path)
    shape = model_shape(CausalLm(str(tmp_path), torch.device("cpu")))
    assert (shape.num_unused, shape.query_width) == (3 * 6 * 3 * 4 * 6, 16)
    dense = 6 * (shape.num_params - 10 * 4 - shape.num_unused) * 5
    assert Utilisation(shape, 1, 1.0).flops(torch.tensor([5])) == dense + 12 * 3 * 16 * 5 * 5 / 2


def test_frozen_weights_have_no_gradient() -> None:
    shape = ModelShape(10, 0, 4, 16, 4, None, num_looked_up=2, num_adapted=3)
    assert Utilisation(shape, 1, 1.0).flops(torch.tensor([5])) == (4 * 8 + 2 * 3) * 5


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_layers_below_have_no_backward_pass(tied: bool, tmp_path: Path) -> None:
    """Of 3 layers the last is trained: two have a forward pass only; the head is read in both, and has no gradient."""
    sizes = {"vocab_size": 10, "hidden_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1}
    more = {"intermediate_size": 6, "num_hidden_layers": 3, "tie_word_embeddings": tied}
    Qwen2Config(**sizes, **more).save_pretrained(tmp_path)
    config = Config()
    config.actor_rollout_ref.model.path = str(tmp_path)
    config.actor_rollout_ref.model.trained_layers = 1
    shape = policy_shape(config)
    layer = 4 * 4 * 4 + 3 * 4 + 3 * 4 * 6 + 2 * 4  # products and their biases, and two norms
    head, norm = 10 * 4, 4
    assert (shape.num_params, shape.num_trained) == (3 * layer + (1 if tied else 2) * head + norm, layer)
    passes = 3 * layer + head + norm, layer + head + norm, layer + norm  # forward, backward to inputs, to weights
    attention = 4 * 5 * 5 / 2 * (4 * 3 + 8 * 1)  # 4 forward and 8 backward a layer, half of the pairs
    assert Utilisation(shape, 1, 1.0).flops(torch.tensor([5])) == 2 * sum(passes) * 5 + attention

    config.actor_rollout_ref.model.lora_rank = 2
    adapted = policy_shape(config)
    adapters = 2 * (4 * (4 + 4) + 3 * (4 + 6))
    assert adapted.num_trained == adapters
    assert Utilisation(adapted, 1, 1.0).flops(torch.tensor([5])) == 2 * (sum(passes[:2]) + adapters) * 5 + attention


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce RTX 5090", "AMD Instinct MI300X"])
def test_a_device_without_data_sheet_has_no_utilisation(name: str) -> None:
    assert Utilisation.of(Config(), ModelShape(10, 3, 4, 16, 4, None), name, 8) is None


@pytest.mark.parametrize(
    ("name", "flops"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100-PCIE-40GB", 312e12)],
)
def test_gpus_are_known_by_their_drivers_names(name: str, flops: float) -> None:
    config = Config()
    config.actor_rollout_ref.model.path = str(SHAPES / "Qwen2.5-7B")  # its embedding is not its head
    found = Utilisation.of(config, policy_shape(config), name, 8)
    assert found is not None and found.promised_flops == 8 * flops
    assert found.shape.num_looked_up == 152064 * 3584


def test_retriever_metrics_by_hand() -> None:
    """250 searches that took 1 to 250 ms, in a step of 20 s, beside turns that did not search."""
    milliseconds = [float(1 + place * 7 % 250) for place in range(250)]  # each once, in no order
    group = Group(Prompt((1,), "s", {}), ["train"] * 5, 1, 0)
    for place in range(5):
        searches = [{"action": "search", "milliseconds": ms} for ms in milliseconds[place::5]]
        group.results[place] = Trajectory("g", group.prompt, [], events=[*searches, {"action": "answer"}])
    assert retriever_metrics(WorkOfStep([]).on([group]).search_ms, 20.0) == {
        "perf/retriever/queries_per_s": 12.5,
        "perf/retriever/p50_ms": 125.0,
        "perf/retriever/p99_ms": 248.0,  # 99% of 250 are 247.5
    }
    assert retriever_metrics([], 20.0) == {}


def test_the_work_of_a_step_is_what_it_added(answered: Trajectory) -> None:
    """One trajectory was interrupted in its first turn, one had ended, one fails and is sampled anew, one is new."""
    group = Group(answered.prompt, ["train"] * 4, 1, 0)
    ended = replace(answered, events=[{"milliseconds": 5.0}, {}])
    interrupted = replace(answered, segments=answered.segments[:2], events=[{"turn": 0}])
    group.begun |= {0: interrupted, 2: interrupted}
    group.results[1] = ended
    step = WorkOfStep([group])
    assert step.on([group]) == (0, 0, [])
    group.begun.clear()
    group.results |= {0: replace(answered, events=[{"milliseconds": 7.0}, {}]), 2: ended, 3: ended}
    group.attempts[2] = 1
    # 12 tokens, of which 5 are the policy's; 5 and 2 of them were there already of the interrupted one
    assert step.on([group]) == (7 + 0 + 12 + 12, 3 + 0 + 5 + 5, [7.0, 5.0, 5.0])


def test_an_episode_that_begins_again_without_its_state_is_all_new_work() -> None:
    """Beside one of a program, of which both sequences go on."""
    prompt, begun = Segment(Source.PROMPT, (1, 2)), Segment(Source.POLICY, (3, 3, 3), (-1.0,) * 3)
    context, longer = Segment(Source.CONTEXT, (1,)), begun.extended(Segment(Source.POLICY, (4,), (-1.0,)))

    def of(*segments: Segment, milliseconds: float) -> Trajectory:
        return Trajectory("g", Prompt((1, 2), "s", {}), list(segments), events=[{"milliseconds": milliseconds}])

    group = Group(Prompt((1, 2), "s", {}), ["train"] * 2, 1, 0)
    group.begun |= {0: of(prompt, begun, milliseconds=5.0), 1: of(prompt, begun, context, begun, milliseconds=6.0)}
    step = WorkOfStep([group])
    group.begun.clear()
    group.results[0] = of(prompt, Segment(Source.POLICY, (5,), (-1.0,)), milliseconds=7.0)
    group.results[1] = of(prompt, longer, context, longer, milliseconds=6.0)
    assert step.on([group]) == (3 + 2, 1 + 2, [7.0])


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def set_clock(now: float) -> None:
        monkeypatch.setattr(rollouts_ahead.time, "monotonic", lambda: now)

    set_clock(0.0)
    return set_clock


def test_only_time_between_start_and_stop_counts(at: Callable[[float], None]) -> None:
    clock = IdleClock()
    at(1.0)
    clock.start()
    at(3.0)
    clock.start()  # twice: since the first
    at(4.0)
    clock.stop()
    clock.stop()
    at(9.0)
    assert clock.read() == 3.0 and clock.read() == 0.0


def test_what_is_done_inside_a_wait_does_not_count(at: Callable[[float], None]) -> None:
    clock = IdleClock()
    clock.start()
    at(2.0)
    with clock.stopped():
        at(7.0)
        with clock.stopped():
            at(8.0)
    at(9.5)
    assert clock.read() == 3.5  # 2 before, 1.5 after
    at(10.0)
    assert clock.read() == 0.5, "it goes on"


def test_nothing_that_is_done_starts_a_clock_that_does_not_run(at: Callable[[float], None]) -> None:
    clock = IdleClock()
    with clock.stopped():
        at(5.0)
    at(6.0)
    assert clock.read() == 0.0


def test_summaries_are_counted_where_there_are_any(answered: Trajectory, wandered: Trajectory) -> None:
    names = ("env/number_of_summaries", "env/ratio_of_valid_summary")
    assert not set(names) & environment_metrics([answered, wandered]).keys()
    said = [{"turn": turn, "is_summary": True, "valid": turn != 1} for turn in (1, 3, 5)]
    summed_up = replace(wandered, events=[*wandered.events, *said])
    found = environment_metrics([answered, summed_up, summed_up])
    assert [found[name] for name in names] == pytest.approx([2.0, 2 / 3])


def test_sequences_are_counted_only_where_a_rollout_has_several(answered: Trajectory, wandered: Trajectory) -> None:
    """What a further sequence begins with is no response: the lengths are those of the rollout that was not cut."""
    names = {f"env/number_of_sequences/{kind}" for kind in ("mean", "max", "min")}
    rows = [answered, wandered]
    whole = step_metrics(rows, TrainBatch.from_trajectories(rows))
    assert not names & whole.keys()
    rows = [answered, in_sequences(wandered, 3, 5)]
    cut = step_metrics(rows, TrainBatch.from_trajectories(rows))
    assert [cut[f"env/number_of_sequences/{kind}"] for kind in ("mean", "max", "min")] == [2, 3, 1]
    assert {name: value for name, value in cut.items() if name not in names} == whole
