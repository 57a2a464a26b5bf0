"""A rollout in several sequences is worth what it is worth in one: every estimate, to the bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cut_rollouts import batch_of, cut, rollouts, written
from hypothesis import given
from hypothesis import strategies as st
from test_estimates import make_config

from verl.algorithms.traits import ESTIMATOR_TRAITS
from verl.protocol import Status, TrainBatch, Trajectory
from verl.tracking.spans import Timer
from verl.trainer.estimates import Estimator, for_critic, for_losses
from verl.trainer.metrics.batch import step_metrics
from verl.trainer.metrics.health import PolicyScores, health_metrics
from verl.trainer.updates import Updates

ACTOR = "actor_rollout_ref.actor"
TURNS = [3, 1, 2, 4, 5, 2]
CUTS = st.lists(st.sets(st.integers(0, 3)), min_size=len(TURNS), max_size=len(TURNS))
IN_REWARD = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1")
CORRECTED = f"{ACTOR}.rollout_correction"
SETTINGS: dict[str, tuple[str, ...]] = {
    **{name: (f"algorithm.adv_estimator={name}",) for name in ESTIMATOR_TRAITS},
    "group_std": ("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=true"),
    "batch_std": (
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "algorithm.norm_adv_by_batch_std=true",
    ),
    "discounted": ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"),
    "gae_of_published": ("algorithm.adv_estimator=gae", "algorithm.gae_over_environment_tokens=true", *IN_REWARD),
    "gae_discounted": ("algorithm.adv_estimator=gae", "algorithm.gamma=0.99", "algorithm.lam=0.9", *IN_REWARD),
    "kl_after": ("algorithm.adv_estimator=rloo", *IN_REWARD, "algorithm.apply_kl_after_advantage=true"),
    "kl_to_go": (
        "algorithm.adv_estimator=grpo",
        *IN_REWARD,
        "algorithm.apply_kl_after_advantage=true",
        "algorithm.use_future_kl_as_reward=true",
    ),
    "adaptive_kl": (
        "algorithm.adv_estimator=rloo",
        *IN_REWARD,
        *(f"algorithm.kl_ctrl.{one}" for one in ("type=adaptive", "target_kl=0.1", "horizon=500")),
    ),
    **{
        f"{importance}_{reject}": (
            "algorithm.adv_estimator=rloo",
            f"{ACTOR}.use_rollout_log_probs=false",
            f"{CORRECTED}.importance={importance}",
            f"{CORRECTED}.reject={reject}",
            f"{CORRECTED}.importance_cap=1.5",
        )
        for importance, reject in product(("token", "sequence"), ("token", "sequence", "geometric"))
    },
}


class Passes:
    """Stands for the ranks of actor and critic: what their passes find are columns that the batch has already."""

    def __init__(self, batch: TrainBatch) -> None:
        self.found = {name: batch.tokens.pop(name) for name in ("old_log_probs", "ref_log_probs", "values", "returns")}

    def log_probs(self, batch: TrainBatch, of: str = "policy", top_k: int = 0) -> dict[str, torch.Tensor]:
        column = self.found["ref_log_probs" if of == "anchor" else "old_log_probs"]
        return {"log_prob": column, "entropy": self.found["returns"]}

    def begin_values(self, batch: TrainBatch) -> Any:
        return lambda: torch.where(batch.tokens["loss_mask"], self.found["values"], 0.0)


def estimated(trajectories: list[Trajectory], settings: tuple[str, ...]) -> tuple[TrainBatch, dict[str, float]]:
    """The batch as the update gets it, and all metrics of the step that are not about lengths of rows."""
    config = make_config(*settings)
    batch = batch_of(trajectories)
    del batch.tokens["advantages"], batch.tokens["correction"]
    batch.rows["baseline"] = (torch.arange(batch.num_rollouts) / 8)[batch.rollout_B]
    passes: Any = Passes(batch)
    critic = passes if config.algorithm.adv_estimator == "gae" else None
    estimator = Estimator(config)
    metrics = estimator.prepare(batch, passes, critic, Timer())
    metrics["kl_weight"] = estimator.kl_weight.value
    trained = for_losses(batch, Updates(config, passes, None).kept(trajectories))
    metrics |= step_metrics(trajectories, trained, policy_T=batch.tokens["loss_mask"])
    return trained, metrics | health_metrics(trajectories, batch, PolicyScores.of(batch))


@pytest.mark.parametrize("name", SETTINGS)
@given(cuts=CUTS)
def test_estimates_and_metrics_are_those_of_the_whole(name: str, cuts: list[set[int]]) -> None:
    whole = rollouts(TURNS)
    whole[4].status = Status.LENGTH_LIMIT
    pieces = [cut(one, behind) for one, behind in zip(whole, cuts, strict=True)]
    settings = (*SETTINGS[name], "algorithm.filter_overlong=true")
    (expected, metrics), (found, of_pieces) = estimated(whole, settings), estimated(pieces, settings)
    written_T = written(pieces)
    assert found.tokens.keys() == expected.tokens.keys()
    for column, value_T in expected.tokens.items():
        torch.testing.assert_close(found.tokens[column][written_T], value_T, rtol=0, atol=0, equal_nan=True, msg=column)
    assert not found.tokens["loss_mask"][~written_T].any()
    counted = "env/number_of_sequences/"
    assert {name: value for name, value in of_pieces.items() if not name.startswith(counted)} == metrics


@given(cuts=CUTS)
def test_the_critic_has_values_for_no_context(cuts: list[set[int]]) -> None:
    whole = rollouts(TURNS)
    pieces = [cut(one, behind) for one, behind in zip(whole, cuts, strict=True)]
    for settings in ("true", "false"):
        algorithm = make_config(*SETTINGS["gae"], f"algorithm.gae_over_environment_tokens={settings}").algorithm
        expected_T, found_T = (for_critic(batch_of(one), algorithm).tokens["loss_mask"] for one in (whole, pieces))
        assert torch.equal(found_T[written(pieces)], expected_T) and not found_T[~written(pieces)].any()
