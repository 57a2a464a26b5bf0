"""What a step computes before its update, and what is known after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from run_config import run_config

from verl.config import Config
from verl.protocol import Prompt, Segment, Source, TrainBatch, Trajectory
from verl.tracking.spans import Timer
from verl.trainer.estimates import Estimator, for_critic, for_losses, response_mask, token_rewards
from verl.trainer.metrics.health import PolicyScores, health_metrics
from verl.trainer.sampling.collection import Collected
from verl.trainer.stored_values import token_values
from verl.trainer.updates import Updates

# row 0: prompt, policy, policy, environment, policy; row 1: prompt, prompt, policy, environment
MASK = [False, True, True, False, True, False, False, True, False]
LENGTHS = [5, 4]


def make_batch() -> TrainBatch:
    tokens = {
        "ids": torch.arange(9),
        "loss_mask": torch.tensor(MASK),
        "rollout_log_probs": torch.tensor([9.0, -1.0, -2.0, 9.0, -3.0, 9.0, 9.0, -1.0, 9.0]),
    }
    rows = {"reward": torch.tensor([1.0, 0.25]), "group": torch.tensor([0, 0])}
    return TrainBatch(torch.tensor(LENGTHS), tokens, rows)


@cache
def make_config(*overrides: str) -> Config:
    required = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
    small = ["actor_rollout_ref.rollout.n_agent=2", "actor_rollout_ref.actor.use_rollout_log_probs=true"]
    return run_config([*required, *small, "algorithm.adv_estimator=reinforce", *overrides])


class Anchor:
    """Stands for the actor's workers: the anchor's log-probs are those of the sampler less `below` nats.

    Those of tokens that the policy did not write are lower by 7, which must not be seen.
    """

    def __init__(self, below: float) -> None:
        self.below = below

    def log_probs(self, batch: TrainBatch, of: str = "policy", top_k: int = 0) -> dict[str, torch.Tensor]:
        assert of == "anchor" and not top_k
        below_T = torch.full((len(batch.tokens["ids"]),), 7.0)
        below_T[batch.tokens["loss_mask"]] = self.below
        return {"log_prob": batch.tokens["rollout_log_probs"] - below_T}


def prepare(estimator: Estimator, batch: TrainBatch, below: float = 0.5) -> dict[str, float]:
    return estimator.prepare(batch, Anchor(below), None, Timer())  # type: ignore[arg-type]


def test_a_reward_lies_at_the_last_policy_token() -> None:
    assert token_rewards(make_batch()).tolist() == [0, 0, 0, 0, 1.0, 0, 0, 0.25, 0]


def test_a_row_without_policy_tokens_has_no_reward() -> None:
    batch = make_batch()
    batch.tokens["loss_mask"][7] = False
    assert token_rewards(batch).tolist() == [0, 0, 0, 0, 1.0, 0, 0, 0, 0]


def test_the_response_begins_at_the_first_policy_token() -> None:
    expected = [False, True, True, True, True, False, False, True, True]
    assert response_mask(make_batch()).tolist() == expected
    published = make_config("algorithm.adv_estimator=gae", "algorithm.gae_over_environment_tokens=true").algorithm
    assert for_critic(make_batch(), published).tokens["loss_mask"].tolist() == expected
    assert for_critic(make_batch(), make_config().algorithm).tokens["loss_mask"].tolist() == MASK


def test_what_is_left_out_of_the_losses() -> None:
    batch = make_batch()
    assert for_losses(batch).tokens["loss_mask"].tolist() == MASK
    batch.tokens["keep"] = torch.ones(9, dtype=torch.bool).index_fill(0, torch.tensor([2]), False)
    left = for_losses(batch, torch.arange(9) < 5).tokens["loss_mask"]
    assert left.tolist() == [False, True, False, False, True, False, False, False, False]
    assert batch.tokens["loss_mask"].tolist() == MASK, "the batch itself keeps its mask"


class Critic:
    """Keeps the loss mask that it is to train on."""

    apart = False

    def begin_update(self, batch: TrainBatch) -> Any:
        self.mask = batch.tokens["loss_mask"].tolist()
        return lambda: [{}]


# Of the policy's tokens 1, 2 and 4 of the first row and 7 of the second, which are kept, and what the critic trains on
# when it has values for retrieved tokens, too (3 and 8).
KEPT = {
    "all": ((1, 2, 4, 7), (1, 2, 3, 4, 7, 8)),
    "not the first": ((2, 4, 7), (2, 3, 4, 7, 8)),
    "not one beside a retrieved token": ((1, 4, 7), (1, 3, 4, 7, 8)),
    "not the last": ((1, 2, 7), (1, 2, 3, 7, 8)),
    "no row": ((1, 2, 4), (1, 2, 3, 4)),
}


@pytest.mark.parametrize(("kept", "expected"), KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("over_environment", [True, False])
@pytest.mark.parametrize("by", ["rejection", "settings"])
def test_the_critic_learns_nothing_of_what_is_left_out_of_the_losses(
    kept: tuple[int, ...], expected: tuple[int, ...], over_environment: bool, by: str
) -> None:
    config = make_config(
        "algorithm.adv_estimator=gae",
        f"algorithm.gae_over_environment_tokens={str(over_environment).lower()}",
        "trainer.critic_warmup=1",
    )
    batch, critic = make_batch(), Critic()
    keep_T = torch.zeros(9, dtype=torch.bool).index_fill(0, torch.tensor(kept), True)
    if by == "rejection":
        batch.tokens["keep"] = keep_T
    trained = for_losses(batch, None if by == "rejection" else keep_T)
    updates = Updates(config, None, critic)  # type: ignore[arg-type]
    updates.run(batch, trained, 1, Timer(), lambda: None)
    assert [place for place, learns in enumerate(critic.mask) if learns] == list(expected if over_environment else kept)


def test_kl_in_the_reward() -> None:
    # k1 = 0.5 at each of the 4 policy tokens, weight 0.1: rewards -0.05, -0.05, 1 - 0.05 and 0.25 - 0.05
    estimator = Estimator(make_config("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1"))
    batch = make_batch()
    metrics = prepare(estimator, batch)
    expected = torch.tensor([0, -0.05, -0.05, 0, 0.95, 0, 0, 0.2, 0])
    torch.testing.assert_close(batch.tokens["rewards"], expected)
    assert metrics == {"critic/kl": pytest.approx(0.5), "critic/kl_coeff": 0.1}
    # reinforce: rows 0.85 and 0.2 less their mean 0.525
    advantage = torch.tensor([0, 0.325, 0.325, 0, 0.325, 0, 0, -0.325, 0])
    torch.testing.assert_close(batch.tokens["advantages"], advantage)


@pytest.mark.parametrize(("to_go", "cost"), [(False, [0.5, 0.5, 0.5, 0.5]), (True, [1.5, 1.0, 0.5, 0.5])])
def test_kl_after_the_advantage(to_go: bool, cost: list[float]) -> None:
    # the mean reward is 0.625, so advantages are 0.375 and -0.375, then 0.1 times the KL is taken off
    settings = ("algorithm.use_kl_in_reward=true", "algorithm.apply_kl_after_advantage=true")
    weight = ("algorithm.kl_ctrl.kl_coef=0.1", f"algorithm.use_future_kl_as_reward={str(to_go).lower()}")
    batch = make_batch()
    prepare(Estimator(make_config(*settings, *weight)), batch)
    expected = torch.tensor([0.375, 0.375, 0.375, -0.375]) - 0.1 * torch.tensor(cost)
    torch.testing.assert_close(batch.tokens["advantages"][batch.tokens["loss_mask"]], expected)
    assert batch.tokens["rewards"].tolist() == token_rewards(make_batch()).tolist()


def test_an_adaptive_weight_follows_its_target() -> None:
    # KL 0.5 against a target of 0.1: the error is cut at 0.2, so the weight grows by 1 + 0.2 * 2 / 4
    control = ("type=adaptive", "target_kl=0.1", "horizon=4", "kl_coef=0.1")
    overrides = [f"algorithm.kl_ctrl.{value}" for value in control]
    estimator = Estimator(
        make_config("algorithm.use_kl_in_reward=true", *overrides, "data.train_batch_size=2", *SMALL_BATCH)
    )
    assert prepare(estimator, make_batch())["critic/kl_coeff"] == 0.1
    assert prepare(estimator, make_batch())["critic/kl_coeff"] == pytest.approx(0.11)


SMALL_BATCH = ("actor_rollout_ref.actor.ppo_mini_batch_size=4",)


@pytest.mark.parametrize(
    ("mini_batch", "kl_in_reward", "passes"), [(2048, "false", 0), (64, "false", 1), (2048, "true", 1)]
)
def test_a_pass_over_the_policy_only_where_something_needs_it_before_the_update(
    mini_batch: int, kl_in_reward: str, passes: int
) -> None:
    class Actor(Anchor):
        asked: ClassVar[list[str]] = []

        def log_probs(self, batch: TrainBatch, of: str = "policy", top_k: int = 0) -> dict[str, torch.Tensor]:
            self.asked.append(of)
            return {"log_prob": batch.tokens["rollout_log_probs"], "entropy": torch.zeros(9)}

    config = make_config(
        "actor_rollout_ref.actor.use_rollout_log_probs=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        f"algorithm.use_kl_in_reward={kl_in_reward}",
    )
    batch, timer = make_batch(), Timer()
    Estimator(config).prepare(batch, Actor(0.5), None, timer)  # type: ignore[arg-type]
    assert Actor.asked.count("policy") == passes
    assert ("old_log_probs" in batch.tokens) == ("entropy" in batch.tokens) == ("old_log_prob" in timer.seconds)
    assert ("old_log_probs" in batch.tokens) == bool(passes)


def test_the_pass_of_a_topk_kl_also_compares_the_sampler() -> None:
    """Several optimizer steps with the sampler's log-probs as the old ones: the trainer's are computed nevertheless."""
    top_k = ("kl_loss_type=full_reverse", "kl_topk_tokens=4", "use_kl_loss=true", "use_rollout_log_probs=true")
    config = make_config("data.train_batch_size=8", *(f"actor_rollout_ref.actor.{one}" for one in top_k), *SMALL_BATCH)

    class Actor:
        def log_probs(self, batch: TrainBatch, of: str = "policy", top_k: int = 0) -> dict[str, torch.Tensor]:
            return {"log_prob": batch.tokens["rollout_log_probs"] - 0.25, "entropy": torch.zeros(9)}

    batch = make_batch()
    Estimator(config).prepare(batch, Actor(), None, Timer())  # type: ignore[arg-type]
    assert torch.equal(batch.tokens["old_log_probs"], batch.tokens["rollout_log_probs"])
    scores = Updates(config, None, None).scores(batch, batch)  # type: ignore[arg-type]
    assert health_metrics([], batch, scores)["health/mismatch/max_abs"] == 0.25


def test_no_kl_costs_nothing() -> None:
    batch = make_batch()
    assert prepare(Estimator(make_config()), batch, below=math.nan) == {}
    assert "ref_log_probs" not in batch.tokens


def test_rollout_correction_weights_and_keeps() -> None:
    config = make_config(
        "actor_rollout_ref.actor.use_rollout_log_probs=false",
        "actor_rollout_ref.actor.rollout_correction.importance=token",
        "actor_rollout_ref.actor.rollout_correction.reject=token",
        "actor_rollout_ref.actor.rollout_correction.reject_high=1.5",
    )

    class Policy:
        def log_probs(self, batch: TrainBatch, of: str = "policy", top_k: int = 0) -> dict[str, torch.Tensor]:
            shift = torch.tensor([0, 0.0, math.log(1.2), 0, math.log(3.0), 0, 0, 0.0, 0])
            zero = torch.zeros(9)
            return {"log_prob": batch.tokens["rollout_log_probs"] + shift, "entropy": zero}

    batch = make_batch()
    metrics = Estimator(config).prepare(batch, Policy(), None, Timer())  # type: ignore[arg-type]
    assert batch.tokens["correction"][[1, 2]].tolist() == pytest.approx([1.0, 1.2])
    assert batch.tokens["keep"].nonzero().flatten().tolist() == [1, 2, 7]
    assert metrics["rollout_correction/rejected_share"] == 0.25


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        ((), False),
        (("actor_rollout_ref.ref.log_probs=score",), True),
        (("actor_rollout_ref.actor.ppo_epochs=2",), True),
        (("actor_rollout_ref.ref.fsdp_config.param_offload=true",), True),
        (("actor_rollout_ref.actor.kl_loss_type=full_reverse",), False),
    ],
)
def test_a_pass_over_the_anchor_only_where_the_update_does_not_read_it(overrides: tuple[str, ...], reads: bool) -> None:
    config = make_config("actor_rollout_ref.actor.use_kl_loss=true", *overrides)
    batch, timer = make_batch(), Timer()
    Estimator(config).prepare(batch, Anchor(0.5), None, timer)  # type: ignore[arg-type]
    assert ("ref_log_probs" in batch.tokens) == ("ref" in timer.seconds) == reads


class Workers:
    """Stands for the actor's workers: each token's log-prob is -2, its entropy 0.5, where the loss mask is."""

    def update(self, batch: TrainBatch, beside: object) -> dict[str, float]:
        return {"actor/way": 0.0}

    def update_and_score(
        self, batch: TrainBatch, beside: object, names: Sequence[str]
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        mask_T = batch.tokens["loss_mask"].float()
        found = {"log_prob": -2 * mask_T, "entropy": 0.5 * mask_T, "kl": 0.25 * mask_T}
        return {"actor/way": 1.0}, {name: found[name] for name in names}


def make_two_rows() -> TrainBatch:
    """Two rows; tokens 1 and 2 of the first and 1 of the second are the policy's, sampled at -1.5 nats."""
    mask_T = torch.tensor([False, True, True, False, True])
    tokens = {"ids": torch.arange(5), "loss_mask": mask_T, "rollout_log_probs": torch.full((5,), -1.5)}
    return TrainBatch(torch.tensor([3, 2]), tokens)


def make_updates(*overrides: str) -> Updates:
    required = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
    group = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=2"]
    workers: Any = Workers()
    return Updates(run_config([*required, *group, *overrides]), workers, None)


@pytest.mark.parametrize("from_rollout", [False, True])
def test_scores_of_the_update(from_rollout: bool) -> None:
    """The second row is left out of the losses, so nothing is known of it."""
    updates = make_updates(
        "actor_rollout_ref.actor.ppo_mini_batch_size=2048",
        f"actor_rollout_ref.actor.use_rollout_log_probs={str(from_rollout).lower()}",
    )
    batch = make_two_rows()
    if from_rollout:
        batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
    kept_T = batch.tokens["loss_mask"] & (batch.row_of_token_T == 0)
    trained = replace(batch, tokens=batch.tokens | {"loss_mask": kept_T})
    assert updates.run(batch, trained, 1, Timer(), lambda: None)["actor/way"] == 1
    scores = updates.scores(batch, trained)
    assert scores.log_prob_T is not None and scores.log_prob_T.tolist() == [0, -2, -2, 0, 0]
    metrics = health_metrics([], batch, scores)
    assert metrics["health/mismatch/mean_abs"] == pytest.approx(0.5)
    assert metrics["health/entropy"] == pytest.approx(0.5)


def test_scores_from_before_the_update() -> None:
    """With several optimizer steps; the sampler's own say nothing."""
    batch = make_two_rows()
    batch.tokens["old_log_probs"] = torch.full((5,), -1.75)
    updates = make_updates("actor_rollout_ref.actor.ppo_mini_batch_size=1024")
    assert updates.run(batch, batch, 1, Timer(), lambda: None)["actor/way"] == 0
    assert health_metrics([], batch, updates.scores(batch, batch))["health/mismatch/mean_abs"] == pytest.approx(0.25)
    rollout = make_updates(
        "actor_rollout_ref.actor.ppo_mini_batch_size=1024", "actor_rollout_ref.actor.use_rollout_log_probs=true"
    )
    assert rollout.scores(batch, batch).log_prob_T is None
    assert not [name for name in health_metrics([], batch, rollout.scores(batch, batch)) if "mismatch" in name]


def sampled(group: str) -> Trajectory:
    ids = (1, 2, 3) if group == "a" else (1, 2)
    policy = Segment(Source.POLICY, ids[1:], (-1.5,) * (len(ids) - 1))
    return Trajectory(group, Prompt((1,), "d", {}), [Segment(Source.PROMPT, (1,)), policy], reward=1.0)


@pytest.mark.parametrize("on", [True, False])
def test_what_is_stored_of_each_token(on: bool) -> None:
    """One failed and was not trained on; the second row of the batch was left out of the losses."""
    updates = make_updates(
        "actor_rollout_ref.actor.ppo_mini_batch_size=2048",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"trainer.save_token_values={str(on).lower()}",
    )
    failed, first, second = Trajectory("c", Prompt((1,), "d", {})), sampled("a"), sampled("b")
    batch = make_two_rows()
    batch.tokens["advantages"] = torch.tensor([0, 0.5, 0.5, 0, -0.5])
    trained = replace(
        batch, tokens=batch.tokens | {"loss_mask": batch.tokens["loss_mask"] & (batch.row_of_token_T == 0)}
    )
    updates.run(batch, trained, 1, Timer(), lambda: None)
    collected = Collected([failed, second, first], [first, second], batch)
    values = token_values(collected, trained, updates.scores(batch, trained))
    assert list(values.rows) == [2, 1] and values.lengths_R.tolist() == [3, 2]
    found = {name: value_T[known_T].tolist() for name, (value_T, known_T) in values.columns.items()}
    assert found == {"advantages": [0.5, 0.5, -0.5], "old_log_probs": [-2, -2]} | ({"kl": [0.25, 0.25]} if on else {})


def test_what_is_stored_of_a_rollout_in_several_sequences() -> None:
    """Its values are those of its sequences, one after the other."""
    first, second = sampled("a"), sampled("b")
    first.segments += [Segment(Source.CONTEXT, (1, 3)), Segment(Source.POLICY, (4,), (-1.0,))]
    batch = TrainBatch.from_trajectories([first, second])
    batch.tokens["advantages"] = torch.arange(8.0)
    values = token_values(Collected([second, first], [first, second], batch), batch, PolicyScores.of(batch))
    assert list(values.rows) == [1, 0] and values.lengths_R.tolist() == [6, 2]
    value_T, known_T = values.columns["advantages"]
    assert value_T[known_T].tolist() == [1, 2, 5, 7]


def test_a_kl_in_the_reward_is_of_all_tokens() -> None:
    """It was computed before anything was left out of the losses."""
    batch = make_two_rows()
    batch.tokens |= {"advantages": torch.zeros(5), "kl": torch.tensor([0.0, 1, 2, 0, 3])}
    batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
    trained = replace(batch, tokens=batch.tokens | {"loss_mask": torch.zeros(5, dtype=torch.bool)})
    first, second = sampled("a"), sampled("b")
    values = token_values(Collected([first, second], [first, second], batch), trained, PolicyScores.of(batch))
    kl_T, known_T = values.columns["kl"]
    assert kl_T[known_T].tolist() == [1, 2, 3]
