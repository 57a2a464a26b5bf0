"""Health metrics against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.trainer.metrics.health import PolicyScores, health_metrics


def trajectory(
    *turns: tuple[int, ...],
    group: str = "g",
    reward: float | None = 0.0,
    num_valid: int = 0,
    status: Status = Status.ANSWERED,
    events: list[dict[str, object]] | None = None,
) -> Trajectory:
    """A prompt of 2 tokens, then the turns with one retrieved token between them; the sampler's log-probs are -1."""
    segments = [Segment(Source.PROMPT, (1, 2))]
    for index, ids in enumerate(turns):
        if index:
            segments.append(Segment(Source.ENVIRONMENT, (3,)))
        segments.append(Segment(Source.POLICY, ids, (-1.0,) * len(ids)))
    return Trajectory(
        group,
        Prompt((1, 2), "nq", {}),
        segments,
        status,
        num_turns=len(turns),
        num_valid_actions=num_valid,
        events=events or [],
        reward=reward,
    )


def failed(*turns: tuple[int, ...], **changes: object) -> Trajectory:
    return trajectory(*turns, status=Status.FAILED, reward=None, **changes)  # type: ignore[arg-type]


def with_old_log_probs(*rows: tuple[Trajectory, list[float]]) -> TrainBatch:
    """A batch where the trainer's log-prob of the k-th policy token is the sampler's, -1, plus the k-th difference.

    Tokens that the policy did not write differ by 100, which must not be seen.
    """
    batch = TrainBatch.from_trajectories([t for t, _ in rows])
    old_T = batch.tokens["rollout_log_probs"] + 100
    old_T[batch.tokens["loss_mask"]] = torch.tensor([d - 1 for _, differences in rows for d in differences])
    batch.tokens["old_log_probs"] = old_T
    return batch


def test_invalid_actions_are_counted_over_turns_that_did_not_fail() -> None:
    # 3 turns with 2 valid and 2 turns with 1 valid: 2 invalid of 5. The failed one would make it 4 of 7.
    rows = [trajectory((5,), (6,), (7,), num_valid=2), trajectory((5,), (6,), num_valid=1), failed((5,), (6,))]
    assert health_metrics(rows, None)["health/invalid_action_ratio"] == pytest.approx(2 / 5)


def test_empty_thoughts_are_what_the_events_say() -> None:
    # Known of three turns, two of them without a thought; the event without the key and the failed one do not count.
    rows = [
        trajectory((5,), (6,), events=[{"empty_think": True}, {"empty_think": False}]),
        trajectory((5,), (6,), events=[{"empty_think": True}, {"turn": 1}]),
        failed((5,), events=[{"empty_think": False}]),
    ]
    assert health_metrics(rows, None)["health/empty_think_ratio"] == pytest.approx(2 / 3)


def test_empty_thoughts_are_left_out_when_no_event_knows() -> None:
    assert "health/empty_think_ratio" not in health_metrics([trajectory((5,), events=[{"turn": 0}])], None)


def test_repetition_counts_later_copies_of_a_4_gram() -> None:
    # 7777777 has four 4-grams, all the same: three repeat the first. 1234 and 5678 have one each, both new.
    assert health_metrics([trajectory((7,) * 7)], None)["health/repetition"] == pytest.approx(3 / 4)
    assert health_metrics([trajectory((1, 2, 3, 4), (5, 6, 7, 8))], None)["health/repetition"] == 0


def test_repetition_looks_back_over_turns_but_not_over_trajectories() -> None:
    # Turn two says turn one again, 2 of its 2 4-grams repeat: 2 of 4. The other trajectory's 2 are its own: 2 of 6.
    rows = [trajectory((1, 2, 3, 4, 5), (1, 2, 3, 4, 5)), trajectory((1, 2, 3, 4, 5))]
    assert health_metrics(rows, None)["health/repetition"] == pytest.approx(2 / 6)


def test_a_4_gram_does_not_reach_over_a_turn() -> None:
    # Turns of 3 tokens hold none, however often they come; a failed trajectory's count nowhere.
    assert "health/repetition" not in health_metrics([trajectory((1, 2, 3), (1, 2, 3)), failed((7,) * 9)], None)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=3), min_size=1, max_size=3),
    st.sampled_from([0, 150_000, 2**31]),
)
def test_repetition_is_what_a_reader_would_count(small: list[list[list[int]]], smallest_id: int) -> None:
    """The larger the ids, the fewer of them fit into one number of 64 bits."""
    rows = [[[smallest_id + token for token in ids] for ids in turns] for turns in small]
    repeats, total = 0, 0
    for turns in rows:
        seen: list[list[int]] = []
        for ids in turns:
            for start in range(len(ids) - 3):
                repeats += ids[start : start + 4] in seen
                total += 1
                seen.append(ids[start : start + 4])
    metrics = health_metrics([trajectory(*map(tuple, turns)) for turns in rows], None)
    assert metrics.get("health/repetition") == (pytest.approx(repeats / total) if total else None)


def test_repetition_keeps_ids_of_a_large_vocabulary_apart() -> None:
    """Three hundred trajectories of the largest ids: 152000^4 alone is past 64 bits."""
    ids = tuple(range(151_990, 152_000))
    assert health_metrics([trajectory(ids) for _ in range(300)], None)["health/repetition"] == 0


def test_zero_variance_groups_leaves_out_groups_of_one() -> None:
    # a: 1, 1 equal. b: 0, 1 not. c: 0.5, 0.5, 0.5 equal. d has one row left. So 2 of 3.
    rewards = [("a", 1.0), ("b", 0.0), ("c", 0.5), ("d", 1.0), ("a", 1.0), ("b", 1.0), ("c", 0.5), ("c", 0.5)]
    rows = [trajectory((5,), group=group, reward=reward) for group, reward in rewards]
    metrics = health_metrics([*rows, failed((5,), group="d")], None)
    assert metrics["health/zero_variance_groups"] == pytest.approx(2 / 3)
    assert "health/zero_variance_groups" not in health_metrics(rows[:4], None)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([0.8, 0.8, 0.8], 1.0),
        ([0.8, 0.8, 0.1], 0.0),
        ([0.3, 0.1 + 0.2], 1.0),  # equal in float32
        ([0.8], None),
        ([], None),
    ],
)
def test_equal_rewards_says_whether_all_are_the_same(rewards: list[float], equal: float | None) -> None:
    """Of different prompts: there is no group of two."""
    rows = [trajectory((5,), group=str(row), reward=reward) for row, reward in enumerate(rewards)]
    assert health_metrics([*rows, failed((5,))], None).get("health/equal_rewards") == equal


def test_zero_advantages_is_a_share_of_the_trained_tokens() -> None:
    batch = with_old_log_probs((trajectory((5, 6), (7,)), [0.0] * 3), (trajectory((5,)), [0.0]))
    assert "health/zero_advantages" not in health_metrics([], batch)
    batch.tokens["advantages"] = torch.zeros(len(batch.tokens["ids"]))
    assert health_metrics([], batch)["health/zero_advantages"] == 1.0
    batch.tokens["advantages"][batch.tokens["loss_mask"]] = torch.tensor([0.0, 1e-9, -1.0, 0.0])
    assert health_metrics([], batch)["health/zero_advantages"] == 0.5


def test_a_finished_trajectory_without_a_reward_is_an_error() -> None:
    with pytest.raises(ValueError, match="group g.*has no reward.*score"):
        health_metrics([trajectory((5,), reward=None)], None)


def test_entropy_is_the_mean_over_policy_tokens() -> None:
    # Policy tokens have 0.2, 0.4 and 0.9: mean 0.5. Prompt and retrieved tokens have 50.
    batch = TrainBatch.from_trajectories([trajectory((5,), (6, 7))])
    batch.tokens["entropy"] = torch.tensor([50, 50, 0.2, 50, 0.4, 0.9])
    assert health_metrics([], batch)["health/entropy"] == pytest.approx(0.5)


def test_mismatch_by_turn_and_overall() -> None:
    # exp(d) - 1 - d: at ln 2 it is 1 - ln 2; at -ln 2 it is ln 2 - 1/2; at -ln 4 it is ln 4 - 3/4; at 0 it is 0.
    # Turn 0 is the first two tokens of row one and the only token of row two: d = ln 2, 0, -ln 2.
    # Turn 1 is the last token of row one: d = -ln 4.
    ln2 = math.log(2)
    batch = with_old_log_probs((trajectory((5, 6), (7,)), [ln2, 0, -2 * ln2]), (trajectory((8,)), [-ln2]))
    metrics = health_metrics([], batch)
    expected = {
        "health/mismatch/mean_abs": 4 * ln2 / 4,
        "health/mismatch/max_abs": 2 * ln2,
        "health/mismatch/k3": ((1 - ln2) + (ln2 - 0.5) + (2 * ln2 - 0.75)) / 4,
        "health/mismatch_turn_0/mean_abs": 2 * ln2 / 3,
        "health/mismatch_turn_0/k3": ((1 - ln2) + (ln2 - 0.5)) / 3,
        "health/mismatch_turn_1/mean_abs": 2 * ln2,
        "health/mismatch_turn_1/k3": 2 * ln2 - 0.75,
    }
    assert metrics == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}


def test_k3_is_right_where_the_models_agree_almost() -> None:
    # For small d, exp(d) - 1 - d is d^2 / 2; with d = 2^-20 that is 2^-41, far below what float32 keeps next to 1.
    batch = with_old_log_probs((trajectory((5,)), [2.0**-20]))
    assert health_metrics([], batch)["health/mismatch/k3"] == pytest.approx(2.0**-41, rel=1e-3)


def test_k3_estimates_the_kl_from_the_sampler_to_the_trainer() -> None:
    # Sampler 3/4, 1/4; trainer 1/2, 1/2. Of four tokens drawn as the sampler would, three are the first. Then k3 is
    # KL(sampler || trainer) = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.1308; the other way round it would be 0.1438.
    d = [math.log(2 / 3)] * 3 + [math.log(2)]
    batch = with_old_log_probs((trajectory((5, 5, 5, 6)), d))
    assert health_metrics([], batch)["health/mismatch/k3"] == pytest.approx(0.1308, abs=1e-4)


def test_only_the_first_eight_turns_have_figures_of_their_own() -> None:
    batch = with_old_log_probs((trajectory(*[(5,)] * 9), [0.0] * 8 + [0.9]))
    metrics = health_metrics([], batch)
    turns = sorted(name for name in metrics if name.startswith("health/mismatch_turn") and name.endswith("/k3"))
    assert turns == [f"health/mismatch_turn_{turn}/k3" for turn in range(8)]
    assert metrics["health/mismatch/mean_abs"] == pytest.approx(0.1)


def test_nan_is_shown_and_not_hidden() -> None:
    metrics = health_metrics([], with_old_log_probs((trajectory((5, 6)), [0.1, math.nan])))
    assert all(math.isnan(metrics[f"health/mismatch/{name}"]) for name in ("mean_abs", "max_abs", "k3"))


def test_only_scored_tokens_count() -> None:
    # Of two rows the update scored the first: its differences are 0.1 and 0.3. The zeros elsewhere were not found.
    batch = with_old_log_probs((trajectory((5, 6)), [0.1, 0.3]), (trajectory((7,)), [0.9]))
    batch.tokens["entropy"] = torch.tensor([0.0, 0, 1, 2, 0, 0, 0])
    known_T = batch.tokens["loss_mask"] & (batch.row_of_token_T == 0)
    scores = replace(PolicyScores.of(batch), known_T=known_T)
    metrics = health_metrics([], batch, scores)
    assert metrics["health/mismatch/mean_abs"] == pytest.approx(0.2)
    assert metrics["health/entropy"] == pytest.approx(1.5)


def test_a_turn_without_a_scored_token_has_no_mismatch() -> None:
    batch = with_old_log_probs((trajectory((5,), (6,), (7,)), [0.9, 0.1, 0.2]))
    known_T = batch.tokens["loss_mask"] & (batch.turn_of_token_T != 1)
    metrics = health_metrics([], batch, replace(PolicyScores.of(batch), known_T=known_T))
    turns = {name: value for name, value in metrics.items() if "turn" in name and name.endswith("mean_abs")}
    assert turns == {
        "health/mismatch_turn_0/mean_abs": pytest.approx(0.9),
        "health/mismatch_turn_2/mean_abs": pytest.approx(0.2),
    }


def test_what_truncated_sampling_cuts_off_is_no_mismatch() -> None:
    """top_p=0.8 of p = (0.5, 0.3, 0.2) samples from (0.5, 0.3) / 0.8: d = log 0.8 at every token, without a defect."""
    log_z = math.log(0.5) - math.log(0.5 / 0.8)
    batch = with_old_log_probs((trajectory((5, 6)), [log_z, log_z]))
    metrics = health_metrics([], batch)
    assert metrics["health/mismatch/mean_abs"] == pytest.approx(abs(math.log(0.8)), rel=1e-6)
    assert "mismatch" not in " ".join(health_metrics([], batch, truncated=True))


def test_without_the_trainers_log_probs_there_is_no_mismatch() -> None:
    assert health_metrics([], TrainBatch.from_trajectories([trajectory((5,))])) == {}


def test_a_step_of_nothing_but_failures_has_no_metrics() -> None:
    assert health_metrics([failed((5, 6, 7, 8, 9), events=[{"empty_think": True}])], None) == {}
