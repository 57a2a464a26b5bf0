"""Starts a run: everything that its loop uses, and how to stop that again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from verl.agent.environment import environment_class, make_environment
from verl.config import Config
from verl.config.rules.predicates import (
    anchor_moves,
    critic_warmup_warning,
    curriculum_warning,
    has_anchor,
    has_critic,
    length_warning,
    num_training_steps,
)
from verl.engine.files.loading import policy_shape
from verl.pretrained import load_policy_tokenizer
from verl.process.determinism import seed_everything
from verl.process.event_loop import run_to_end
from verl.process.startup import tell
from verl.process.storage import whole_file
from verl.process.watchdog import Watchdog, offer_stacks
from verl.rollout.manager import RolloutManager
from verl.run import saved_state
from verl.run.checkpoints import Checkpoints
from verl.run.resuming import prepare_folder, resumes_here, settings_since, sources_since, state_to_resume
from verl.tracking.background_writer import BackgroundWriter
from verl.tracking.tracker import Tracker
from verl.trainer.collapse_guard import Recovery, compares_first_step
from verl.trainer.ending import report_stall
from verl.trainer.estimates import Estimator
from verl.trainer.evaluation import Evaluator
from verl.trainer.layout import reserve_pools
from verl.trainer.metrics.performance import Performance
from verl.trainer.reward_server import RewardServer
from verl.trainer.sampling.collection import Collector
from verl.trainer.sampling.rollout_source import SamplingState
from verl.trainer.sampling.rollouts_ahead import rollout_source
from verl.trainer.sampling.scoring import Scorer
from verl.trainer.start_checks.inputs import VALIDATION_PROMPTS, Inputs, warn_of_reward
from verl.trainer.stored_values import TrajectoryFiles
from verl.trainer.updates import Updates
from verl.workers.roles import ActorGroup, CriticGroup

log = logging.getLogger(__name__)

WATCHDOG_GRACE_S = 30.0  # a wait's own deadline comes first


class Run:
    """All that a loop works with, started or resumed on "cpu" or "cuda". `steps_done` is 0, or that of the run that is
    resumed; `evaluation_is_left`: that one had no time to validate and test after its last step.

    If something fails, what was started is stopped again.
    """

    def __init__(self, config: Config, device: str, inputs: Inputs) -> None:
        self.config, self.run_dir = config, Path(config.trainer.default_local_dir)
        seed_everything(config.trainer.seed)  # for rewards and environments that use the global generators
        self.tokenizer = load_policy_tokenizer(config)
        self.prompts, self.sources = inputs.prompts, inputs.sources
        tell(f"prompts: {len(self.prompts.train)} for training, {len(self.prompts.val)} for validation")
        self.total_steps = num_training_steps(config, len(self.prompts.train))
        for tell_of in (length_warning, critic_warmup_warning, curriculum_warning):
            if warning := tell_of(config, len(self.prompts.train)):
                log.warning(warning)
        self.estimator = Estimator(config)
        with ExitStack() as started:
            self._start_driver(started)
            self._start_roles(started, device)
            self.evaluation_is_left = False
            self.steps_done = self._resume()
            # Engines must reach the environment, and the reward's server must answer, before a step is sampled.
            self.rollouts.check()
            tell(
                f"attention: {self.rollouts.attention()} in the rollout engine, {self.actor.attention()} in the trainer"
            )
            self.reward_server.check(self.scorer)
            if config.reward.launch is not None:  # else it was tried before Ray was started
                environment = make_environment(config, self.tokenizer)
                warn_of_reward(self.scorer, self.tokenizer, self.prompts, environment)
                run_to_end(environment.close())
            self.source.load(self.steps_done)
            # Nothing has failed: what was started now lives until `shutdown`.
            self._started = started.pop_all()

    def shutdown(self) -> None:
        """Stop every process that was started, whatever state it is in."""
        self._started.close()

    def _start_driver(self, started: ExitStack) -> None:
        """Start what works in this process: the folder, the watchdog, the trackers."""
        # What is resumed is checked first: a start that is refused leaves the folder as it is.
        config, trainer = self.config, self.config.trainer
        changed_sources = sources_since(trainer, self.prompts.train, self.sources)
        self.resumed_state = state_to_resume(trainer)
        if self.resumed_state is not None:
            saved_state.require_roles(self.resumed_state, ["actor", *(["critic"] if has_critic(config) else [])])

        # What is different from an earlier run in the folder.
        prepare_folder(trainer, self.resumed_state)
        for change in settings_since(config):
            log.log(
                logging.INFO if change.harmless else logging.WARNING,
                "settings that differ from the earlier run: %s",
                change,
            )
        for changed in changed_sources:
            log.warning("since the earlier run: %s", changed)

        # A driver that hangs is ended.
        offer_stacks()
        watchdog = Watchdog(trainer.step_timeout_s + WATCHDOG_GRACE_S, partial(report_stall, self.run_dir))
        started.callback(_stop, watchdog.stop)

        # Metrics, the environment's files, and trajectories go to the folder.
        names, resumed = (trainer.project_name, trainer.experiment_name), resumes_here(trainer)
        self.tracker = Tracker(trainer.logger, *names, self.run_dir, asdict(config), self.total_steps, resumed)
        started.callback(_stop, partial(self.tracker.finish, failed=True))  # unless the run has finished it
        for name, text in environment_class(config).files(config).items():
            with whole_file(self.run_dir / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        self.writer = BackgroundWriter()
        started.callback(_stop, self.writer.close)
        # A tokenizer is not for two threads at once: the writer's, and the loop's beside sampling.
        self.files = TrajectoryFiles(config, self.run_dir, self.writer, copy.deepcopy(self.tokenizer).decode)
        self.decode = copy.deepcopy(self.tokenizer).decode

    def _start_roles(self, started: ExitStack, device: str) -> None:
        """Start what works on the devices, and what the loop does with it."""
        # The devices, and the server of the reward, which may take minutes to load beside everything else.
        config = self.config
        pools = reserve_pools(config, device)
        started.callback(_stop, pools.release)
        for line in pools.table.splitlines():
            tell(line)
        self.reward_server = RewardServer(config, pools.reward_server)
        started.callback(_stop, self.reward_server.close)
        self.scorer = Scorer(config, self.tokenizer, self.reward_server.address)

        # The engines first: where they share GPUs with the trained roles, they measure the free memory.
        self.rollouts = RolloutManager(config, pools.sampling, pools.sampling_nodes)
        started.callback(_stop, self.rollouts.shutdown)
        self.actor = ActorGroup(config, pools.training, self.total_steps, has_anchor(config))
        started.callback(_stop, self.actor.shutdown)
        self.critic = CriticGroup(config, pools.critic, self.total_steps) if has_critic(config) else None
        if self.critic is not None:
            started.callback(_stop, self.critic.shutdown)

        # The source of a step's rollouts. `num_shares`: groups of the actor's ranks, each with rows of its own.
        self.num_shares = pools.training.world_size // config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        collector = Collector(config, self.prompts.train, self.rollouts, self.scorer, self.total_steps)
        self.source = rollout_source(config, collector, self.rollouts, self.actor, self.total_steps)
        started.callback(_stop, self.source.close)

        # The other parts of a step.
        moves, most, policy = anchor_moves(config), config.trainer.max_ckpt_to_keep, policy_shape(config)
        size = 4 * policy.num_params  # saved in float32
        self.checkpoints = Checkpoints(self.run_dir, self.actor, self.critic, moves, most, pools.copies, size)
        guard = config.trainer.collapse_guard
        self.recovery = Recovery(guard, self.checkpoints, self.estimator.kl_weight, compares_first_step(guard, device))
        self.updates = Updates(config, self.actor, self.critic)
        self.evaluator = Evaluator(config, self.prompts, self.rollouts, self.scorer, self.files)
        self.performance = Performance(config, policy, self.rollouts, self.actor, self.critic, self.run_dir)

    def _resume(self) -> int:
        """Restore the state of an earlier run, if there is one to resume. Returns the steps that it has done."""
        path = self.resumed_state
        if path is None:
            return 0
        progress = self.checkpoints.resume(path)
        SamplingState.from_json(progress).put_back(self.prompts.train)
        if progress.get("sources", self.sources)[VALIDATION_PROMPTS] != self.sources[VALIDATION_PROMPTS]:
            self.checkpoints.scores = {}  # of other prompts: the best one is to be found among those to come
        self.recovery.resume(progress)
        # A run that is given more steps validates and tests at its own end.
        self.evaluation_is_left = progress.get("evaluation_is_left", False) and progress["step"] == self.total_steps
        log.info("resuming after step %d, from %s", progress["step"], path)
        return int(progress["step"])


def _stop(stop: Callable[[], None]) -> None:
    try:
        stop()
    except Exception as error:  # whatever it is, the others have to be stopped too
        log.warning("while the run was stopped: %s", error)
