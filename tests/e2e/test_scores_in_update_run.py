"""A run whose update finds the old log-probs and Top-k tokens itself is the run with a pass before the update."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_world import metrics_by_step, run_here, small_run
from same_runs import OF_THE_LAYOUT, assert_same_weights, learned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # three runs
SETTINGS = (
    *("actor_rollout_ref.actor.use_rollout_log_probs=false", "actor_rollout_ref.actor.kl_topk_tokens=8"),
    *("actor_rollout_ref.actor.optim.eps=1e-3", "trainer.n_gpus_per_node=2", "trainer.logger=[]"),
    *("trainer.total_training_steps=2", "trainer.deterministic=true", "+trainer.val_before_train=false"),
)


@pytest.fixture(scope="module")
def folders(
    ray_session: object, tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scores")
    runs = {"score": "score", "update": "update", "again": "auto"}
    for name, value in runs.items():
        own = f"actor_rollout_ref.actor.old_log_probs={value}"
        assert run_here(*small_run(tinywiki, policy, tinywiki_url, folder / name, *SETTINGS, own)) == 0
    return {name: folder / name for name in runs}


def test_the_same_metrics_and_weights(folders: dict[str, Path]) -> None:
    before, update = (learned(folders[name], OF_THE_LAYOUT)[1] for name in ("score", "update"))
    assert {"health/entropy", "health/mismatch/mean_abs", "health/mismatch_turn_0/k3", "actor/kl_loss"} <= before.keys()
    assert update == pytest.approx(before, rel=1e-4, abs=1e-6)
    timed = [metrics_by_step(folders[name])[1].keys() for name in ("score", "update")]
    assert ["timing_s/old_log_prob" in names for names in timed] == [True, False]


def test_the_same_bits_when_run_again(folders: dict[str, Path]) -> None:
    update, again = learned(folders["update"], OF_THE_LAYOUT), learned(folders["again"], OF_THE_LAYOUT)
    assert update == again and sorted(update) == [1, 2]
    assert_same_weights(folders["update"], folders["again"], 2, {"actor"})
