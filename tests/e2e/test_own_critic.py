"""PPO whose critic has workers of its own, which work beside the actor's, does what it does in turns with the actor."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_world import metrics_by_step, run_here, small_run
from same_runs import OF_THE_LAYOUT, assert_same_trajectories, assert_same_weights, learned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # three runs
STEPS = 3
# Log-probs of policy and anchor are computed while the critic computes its values.
PPO = (
    *("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=false"),
    *("actor_rollout_ref.actor.use_rollout_log_probs=false", "actor_rollout_ref.actor.ppo_mini_batch_size=12"),
    *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.deterministic=true"),
    *("trainer.logger=[]", "+trainer.val_before_train=false", "trainer.test_freq=2"),
)
APART = ("trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=1")


class World:
    """What all runs here have in common."""

    def __init__(self, tinywiki: Path, policy: Path, url: str, folder: Path) -> None:
        self._given, self.folder = (tinywiki, policy, url), folder
        self._own = (*PPO, f"critic.model.path={policy}")

    def train(self, name: str, *overrides: str) -> None:
        assert run_here(*small_run(*self._given, self.folder / name, *self._own, *overrides)) == 0

    def assert_same(self, one: str, other: str) -> None:
        """The trajectories of the last step, and the weights of all roles after it, to the last bit."""
        folders = (self.folder / one, self.folder / other)
        assert_same_trajectories(*folders, [STEPS])
        assert_same_weights(*folders, STEPS, {"actor", "critic", "ref"})


@pytest.fixture(scope="module")
def world(
    ray_session: object, tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path_factory: pytest.TempPathFactory
) -> World:
    """With a run whose critic takes turns with the actor."""
    world = World(tinywiki, policy, tinywiki_url, tmp_path_factory.mktemp("critic"))
    world.train("turns")
    return world


def test_a_critic_of_its_own_learns_the_same(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """All metrics of all steps, and all weights."""
    caplog.set_level("INFO")
    world.train("apart", *APART)
    assert "layout: 1 rank of the actor, 1 of the critic and 1 engine on CPU" in caplog.text
    turns, apart = (learned(world.folder / name, OF_THE_LAYOUT) for name in ("turns", "apart"))
    assert sorted(apart) == [1, 2, 3] and len(apart[2]) > 60 and {"critic/vf_loss", "critic/kl"} <= apart[2].keys()
    assert apart == turns
    world.assert_same("turns", "apart")
    timed = metrics_by_step(world.folder / "apart")[2]
    assert {"timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/update_critic"} <= timed.keys()
    assert {"memory_gib/score/critic", "memory_gib/update/critic"} <= timed.keys()


def test_a_state_is_of_either_layout(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A run goes on with a critic of its own where it had none."""
    caplog.set_level("INFO")
    state = world.folder / "turns" / "state" / "global_step_2"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={state}")
    world.train("on", *APART, *resume)
    assert "critic.n_gpus_per_node: None -> 1 (does not change what is learned)" in caplog.text
    turns, on = (learned(world.folder / name, OF_THE_LAYOUT) for name in ("turns", "on"))
    assert on == {STEPS: turns[STEPS]}
    world.assert_same("turns", "on")
