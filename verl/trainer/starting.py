"""Starts a run: everything that its loop uses, and how to stop that again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from verl.config import Config
from verl.config.counts import num_training_steps
from verl.config.predicates import anchor_moves, has_anchor, has_critic
from verl.determinism import seed_everything
from verl.pretrained import load_policy_tokenizer
from verl.rollout.manager import RolloutManager
from verl.stacks import offer_stacks
from verl.startup import phase, tell
from verl.tracking.background_writer import BackgroundWriter
from verl.tracking.tracker import Tracker
from verl.trainer.checkpoints import Checkpoints
from verl.trainer.collection import Collector
from verl.trainer.estimates import Estimator
from verl.trainer.evaluation import Evaluator
from verl.trainer.failing import tell_stall
from verl.trainer.layout import reserve_pools
from verl.trainer.performance import Performance
from verl.trainer.prompt_sets import PromptSets, load_prompts
from verl.trainer.recovery import Recovery
from verl.trainer.resuming import prepare_folder, settings_since, state_to_resume
from verl.trainer.roles import ActorGroup, CriticGroup
from verl.trainer.rollout_source import RolloutSource
from verl.trainer.rollouts_ahead import rollout_source
from verl.trainer.sampling_state import SamplingState
from verl.trainer.scoring import Scorer
from verl.trainer.stored_values import TrajectoryFiles
from verl.trainer.updates import Updates
from verl.trainer.watchdog import Watchdog

log = logging.getLogger(__name__)

WATCHDOG_GRACE_S = 30.0  # a wait's own deadline comes first


@dataclass
class Run:
    """What a loop works with. `steps_done` are those of the run that is resumed. `shutdown` stops every process that
    was started, whatever state it is in.
    """

    config: Config
    run_dir: Path
    prompts: PromptSets
    total_steps: int
    steps_done: int
    num_shares: int  # groups of the actor's ranks, each with rows of its own
    rollouts: RolloutManager
    actor: ActorGroup
    critic: CriticGroup | None
    source: RolloutSource
    estimator: Estimator
    updates: Updates
    evaluator: Evaluator
    checkpoints: Checkpoints
    recovery: Recovery
    performance: Performance
    tracker: Tracker
    writer: BackgroundWriter
    files: TrajectoryFiles
    decode: Callable[[Sequence[int]], str]  # for the loop: the writer has its own
    shutdown: Callable[[], None]


def start(config: Config, device: str) -> Run:
    """Start or resume the run on "cpu" or "cuda". What was started is stopped again when something fails."""
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    seed_everything(trainer.seed)  # for rewards and environments that draw from the shared generators
    tokenizer = load_policy_tokenizer(config)
    with phase("loading the prompts"):
        prompts = load_prompts(config, tokenizer)
    total_steps = num_training_steps(config, len(prompts.train))
    tell(f"prompts: {len(prompts.train)} for training, {len(prompts.val)} for validation")
    scorer, estimator = Scorer(config, tokenizer), Estimator(config)
    with ExitStack() as started:
        prepare_folder(trainer)
        for change in settings_since(config):
            log.log(logging.INFO if change.harmless else logging.WARNING, "other than before: %s", change)
        offer_stacks()
        watchdog = Watchdog(trainer.step_timeout_s + WATCHDOG_GRACE_S, partial(tell_stall, run_dir))
        started.callback(_stop, watchdog.stop)
        names = (trainer.project_name, trainer.experiment_name)
        tracker = Tracker(trainer.logger, *names, run_dir, asdict(config), total_steps)
        started.callback(_stop, partial(tracker.finish, failed=True))  # unless the run has finished it
        writer = BackgroundWriter()
        started.callback(_stop, writer.close)
        # A tokenizer is not for two threads at once: the writer's, and the loop's beside sampling.
        files = TrajectoryFiles(config, run_dir, writer, copy.deepcopy(tokenizer).decode)
        pools = reserve_pools(config, device)
        started.callback(_stop, pools.release)
        for line in pools.table.splitlines():
            tell(line)
        rollouts = RolloutManager(config, pools.sampling, pools.sampling_nodes)
        started.callback(_stop, rollouts.shutdown)
        actor = ActorGroup(config, pools.training, total_steps, has_anchor(config))
        started.callback(_stop, actor.shutdown)
        critic = CriticGroup(config, pools.critic, total_steps) if has_critic(config) else None
        if critic is not None:
            started.callback(_stop, critic.shutdown)
        collector = Collector(config, prompts.train, rollouts, scorer, total_steps)
        source = rollout_source(config, collector, rollouts, actor, total_steps)
        started.callback(_stop, source.close)
        checkpoints = Checkpoints(run_dir, actor, critic, anchor_moves(config), trainer.max_ckpt_to_keep)
        run = Run(
            config=config,
            run_dir=run_dir,
            prompts=prompts,
            total_steps=total_steps,
            steps_done=0,
            num_shares=pools.training.world_size // config.actor_rollout_ref.actor.ulysses_sequence_parallel_size,
            rollouts=rollouts,
            actor=actor,
            critic=critic,
            source=source,
            estimator=estimator,
            updates=Updates(config, actor, critic),
            evaluator=Evaluator(config, prompts, rollouts, scorer, files),
            checkpoints=checkpoints,
            recovery=Recovery(trainer.collapse_guard, checkpoints),
            performance=Performance(config, rollouts, actor, critic, run_dir),
            tracker=tracker,
            writer=writer,
            files=files,
            decode=copy.deepcopy(tokenizer).decode,
            shutdown=started.close,
        )
        run.steps_done = _resume(run)
        rollouts.check()
        source.load(run.steps_done)
        run.shutdown = started.pop_all().close
    return run


def _resume(run: Run) -> int:
    """Put the state of an earlier run back, if that is asked for. Returns the number of steps that it has done."""
    path = state_to_resume(run.config.trainer)
    if path is None:
        return 0
    progress = run.checkpoints.resume(path)
    SamplingState.from_json(progress).put_back(run.prompts.train)
    run.estimator.kl_weight.value = progress["kl_weight"]
    run.recovery.guard.load_state_dict(progress["guard"])
    log.info("going on after step %d, from %s", progress["step"], path)
    return int(progress["step"])


def _stop(stop: Callable[[], None]) -> None:
    try:
        stop()
    except Exception as error:  # whatever it is, the others have to be stopped too
        log.warning("while the run was ended: %s", error)
