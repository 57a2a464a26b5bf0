"""Watches the metrics of each step, says when a run has collapsed, and does what the settings ask for then: warn, stop,
or go back to a good checkpoint.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl.algorithms.kl import AdaptiveKL, KLController
from verl.config.sections.trainer import CollapseGuardConfig, GuardAction
from verl.errors import TrainingCollapsed
from verl.run.checkpoints import Checkpoints

log = logging.getLogger(__name__)

SCORE = "critic/score/mean"
SCORE_WINDOW = 10  # steps in the moving average that max_score_drop is measured from
GRAD_NORM = "actor/grad_norm"
STALENESS = "rollout/staleness/max"
MISMATCH = "health/mismatch/mean_abs"
KL = ("actor/kl_loss", "critic/kl")  # of the loss, else of the reward
ENTROPY = ("health/entropy", "actor/entropy_loss")  # of the weights that sampled, else of the update


@dataclass(frozen=True)
class Alarm:
    """A condition that has held for long enough, and what the trainer should do about it.

    `name` is the setting that was broken, `value` the latest value of `metric`, `steps` for how many steps in a row
    the condition has held. `first_bad_step` is the step of the first weights that showed it, one before the first
    step whose metrics did: a step samples, and starts its update, from the weights of the step before. Where sampling
    runs ahead it is earlier by that step's staleness.
    """

    name: str
    metric: str
    value: float
    threshold: float
    steps: int
    first_bad_step: int
    action: GuardAction
    message: str


@dataclass(frozen=True)
class _Limit:
    """A condition with a threshold: it holds where `crossed(value, threshold)`. The first metric reported is read."""

    setting: str
    metrics: tuple[str, ...]
    crossed: Callable[[float, float], bool]


@dataclass(frozen=True)
class _Finding:
    """The state of one condition in one step; `seen` in words."""

    setting: str
    metric: str
    value: float
    threshold: float
    holds: bool
    patience: int
    seen: str = ""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value)


@dataclass
class _Streak:
    first_step: int
    steps: int = 0
    staleness: int = 0  # of the first step


LIMITS = (
    _Limit("max_invalid_action_ratio", ("health/invalid_action_ratio",), operator.gt),
    _Limit("max_repetition", ("health/repetition",), operator.gt),
    _Limit("max_empty_think_ratio", ("health/empty_think_ratio",), operator.gt),
    _Limit("max_zero_variance_groups", ("health/zero_variance_groups",), operator.gt),
    _Limit("min_reward", (SCORE,), operator.lt),
    _Limit("min_entropy", ENTROPY, operator.lt),
    _Limit("max_entropy", ENTROPY, operator.gt),
    _Limit("max_kl", KL, operator.gt),
    _Limit("max_grad_norm", (GRAD_NORM,), operator.gt),
    _Limit("max_mismatch", (MISMATCH,), operator.gt),
)
# Metric, its value in a step that taught nothing, and what that means.
DEAD = (
    ("health/equal_rewards", 1.0, "every trajectory had the same reward, {score:.4g}"),
    ("health/zero_advantages", 1.0, "every advantage was 0"),
    ("health/zero_variance_groups", 1.0, "no group had two different rewards"),
    (GRAD_NORM, 0.0, "the gradient was 0"),
)
ADVICE = {
    "max_invalid_action_ratio": "read some trajectories; a format reward or a longer warm start teaches the tags",
    "max_repetition": "read some trajectories; lower the learning rate or raise the coefficient of the KL",
    "max_empty_think_ratio": "the policy no longer thinks; reward the format or raise the coefficient of the KL",
    "max_zero_variance_groups": "choose prompts neither too easy nor too hard, or sample more trajectories per prompt",
    "min_reward": "check the reward on a trajectory that looks right; use a longer warm start or easier prompts",
    "min_entropy": "the policy no longer explores; lower the learning rate or raise the entropy coefficient",
    "max_entropy": "the policy becomes noise; lower the learning rate or the entropy coefficient",
    "max_kl": "the policy moves away from its anchor; lower the learning rate or raise the coefficient of the KL",
    "max_grad_norm": "lower the learning rate, or the gradient norm for clipping",
    "max_mismatch": "compare precision, temperature and top-p of the rollout engine with what the trainer computes",
    "max_score_drop": "go back to a checkpoint from before the drop and lower the learning rate",
    "dead_run_steps": "nothing can be learned from that, so read some trajectories with their rewards; with a high "
    "score the run is done, with a low one the prompts are too hard, the answers do not follow agent.template, "
    "or the reward (reward.function) is broken",
}
SETTINGS = ("dead_run_steps", "max_score_drop", *(limit.setting for limit in LIMITS))
NOT_FINITE_ADVICE = "a value that is not a finite number does not recover; go back to a checkpoint from before it"


class CollapseGuard:
    """Counts for how many steps in a row each condition of `config` has held.

    A step without a condition's metric does not change its count; a value within the threshold resets it.
    NaN or infinity in a watched metric is an alarm at once.
    """

    def __init__(self, config: CollapseGuardConfig) -> None:
        self.config = config
        self.num_rollbacks = 0
        self._seen: set[str] = set()
        self._forget()

    def observe(self, metrics: Mapping[str, float], step: int) -> Alarm | None:
        """Check the metrics of a step. Returns None without an alarm, and always with `action=off`.

        An alarm is repeated when its condition has held for twice, four times, eight times as long. If several are due,
        the one that began first is returned, and its message names the others.
        """
        self._alarmed = False
        if self.config.action == "off":
            return None
        # A streak that begins in this step remembers how old the weights were that sampled it.
        self._staleness = int(metrics.get(STALENESS, 0))
        findings = list(self._findings(metrics))
        self._seen |= {finding.setting for finding in findings}
        alarms = [alarm for finding in findings if (alarm := self._count(finding, step))]
        if not alarms:
            return None
        self._alarmed = True
        # The one that began first says how far back a checkpoint must be to come from before all of them.
        first = min(alarms, key=lambda alarm: alarm.first_bad_step)
        others = ", ".join(alarm.name for alarm in alarms if alarm is not first)
        return replace(first, message=f"{first.message} Also: {others}.") if others else first

    def metrics(self) -> dict[str, float]:
        """The metrics of the latest `observe`: `health/guard/alarm` (1 or 0), and for each setting that is watched
        `health/guard/{setting}`, for how many steps in a row its condition has held. A setting is watched once a step
        has had its metric. {} with `action=off`.
        """
        if self.config.action == "off":
            return {}
        metrics = {"health/guard/alarm": float(self._alarmed)}
        for name in SETTINGS:
            if name in self._seen:
                streak = self._streaks.get(name)
                metrics[f"health/guard/{name}"] = 0.0 if streak is None else float(streak.steps)
        return metrics

    def not_seen(self) -> dict[str, str]:
        """The limits that were changed from their defaults, with their metrics, where no step so far has had those."""
        if self.config.action == "off":
            return {}
        usual, metric = CollapseGuardConfig(), {limit.setting: limit.metrics[0] for limit in LIMITS}
        changed = [name for name in metric if getattr(self.config, name) not in (None, getattr(usual, name))]
        return {name: metric[name] for name in changed if name not in self._seen}

    def reset(self) -> None:
        """Count a rollback and forget all steps. The next alarm may then stop the run."""
        self.num_rollbacks += 1
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """The state of the guard, JSON-serializable."""
        return {
            "num_rollbacks": self.num_rollbacks,
            "streaks": {name: asdict(streak) for name, streak in self._streaks.items()},
            "scores": list(self._scores),
            "best_average": self._best_average if math.isfinite(self._best_average) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forget()
        self.num_rollbacks = state["num_rollbacks"]
        self._streaks.update({name: _Streak(**streak) for name, streak in state["streaks"].items()})
        self._seen |= self._streaks.keys()
        self._scores.extend(state["scores"])
        self._best_average = -math.inf if state["best_average"] is None else state["best_average"]

    def _forget(self) -> None:
        self._alarmed = False
        self._staleness = 0
        self._streaks: dict[str, _Streak] = {}
        self._scores: deque[float] = deque(maxlen=SCORE_WINDOW)
        self._best_average = -math.inf

    def _findings(self, metrics: Mapping[str, float]) -> Iterator[_Finding]:
        for limit in LIMITS:
            threshold = getattr(self.config, limit.setting)
            metric = next((name for name in limit.metrics if name in metrics), None)
            if threshold is not None and metric is not None:
                value = metrics[metric]
                holds = limit.crossed(value, threshold)
                yield _Finding(limit.setting, metric, value, threshold, holds, self.config.patience)
        yield from self._score_drop(metrics)
        yield from self._dead_run(metrics)

    def _score_drop(self, metrics: Mapping[str, float]) -> Iterator[_Finding]:
        if self.config.max_score_drop is None or SCORE not in metrics:
            return
        score = metrics[SCORE]
        if math.isfinite(score):
            self._scores.append(score)
        if len(self._scores) == SCORE_WINDOW:
            self._best_average = max(self._best_average, sum(self._scores) / SCORE_WINDOW)
        lowest, patience = self._best_average - self.config.max_score_drop, self.config.patience
        yield _Finding("max_score_drop", SCORE, score, lowest, score < lowest, patience)

    def _dead_run(self, metrics: Mapping[str, float]) -> Iterator[_Finding]:
        patience = self.config.dead_run_steps
        if patience is None:
            return
        there = [(name, dead, words) for name, dead, words in DEAD if name in metrics]
        seen = ", ".join(
            words.format(score=metrics.get(SCORE, math.nan)) for name, dead, words in there if metrics[name] == dead
        )
        # All of them share one count, so only one is reported: a value that is not finite before one that is dead.
        findings = [
            _Finding("dead_run_steps", name, metrics[name], dead, metrics[name] == dead, patience, seen)
            for name, dead, _ in there
        ]
        if findings:
            yield max(findings, key=lambda finding: (not finding.finite, finding.holds))

    def _count(self, finding: _Finding, step: int) -> Alarm | None:
        # A good value ends the streak. One that is not finite is never good, and does not wait for the patience.
        if finding.finite and not finding.holds:
            self._streaks.pop(finding.setting, None)
            return None
        streak = self._streaks.setdefault(finding.setting, _Streak(step, staleness=self._staleness))
        streak.steps += 1
        # One that lasts is reported after 1, 2, 4, 8, ... times the patience, not in every step.
        times, rest = divmod(streak.steps, finding.patience)
        if finding.finite and (rest or times.bit_count() != 1):
            return None
        # A run that has used up its rollbacks ends instead.
        action = self.config.action
        if action == "rollback" and self.num_rollbacks >= self.config.max_rollbacks:
            action = "stop"
        return Alarm(
            finding.setting,
            finding.metric,
            finding.value,
            finding.threshold,
            streak.steps,
            streak.first_step - 1 - streak.staleness,  # the step of the first weights that showed it
            action,
            _message(finding, streak),
        )


def good_checkpoint(saved_steps: Sequence[int], first_bad_step: int) -> int | None:
    """The newest of `saved_steps` from before `first_bad_step` (see `Alarm`); None if there is none."""
    return max((step for step in saved_steps if step < first_bad_step), default=None)


def _message(finding: _Finding, streak: _Streak) -> str:
    steps = "1 step" if streak.steps == 1 else f"{streak.steps} steps"
    advice = ADVICE[finding.setting] if finding.finite else NOT_FINITE_ADVICE
    seen = f"{finding.metric} is {finding.value:.4g} (threshold {finding.threshold:.4g})"
    if finding.finite and finding.seen:
        seen = finding.seen
    return f"{finding.setting}: {seen}, for {steps} since step {streak.first_step}. What to do: {advice}."


LR_FACTOR = 0.5
MAX_FIRST_MISMATCH = 0.1
"""Nats. Rounding to bfloat16 makes 0.01 to 0.02; weights that are not those of the trainer make far more."""


def compares_first_step(guard: CollapseGuardConfig, device: str) -> bool:
    """Whether the first step of a run on `device` ("cpu" or "cuda") must show that engine and trainer have the same
    policy. Not with `action=off`, and not with a `max_mismatch`, which is watched instead.
    """
    return device == "cuda" and guard.action != "off" and guard.max_mismatch is None


def require_same_policy(metrics: Mapping[str, float], step: int) -> None:
    """Raise TrainingCollapsed if engine and trainer disagree about the tokens of a run's first step.

    A step that cannot tell is let through with a warning: one without the trainer's log-probs, with tokens that can
    never be sampled (top_p, top_k), or with tokens that older weights have sampled.
    """
    mismatch = metrics.get(MISMATCH)
    if mismatch is None or metrics.get(STALENESS, 0):
        why = f"its tokens were sampled by older weights ({STALENESS})" if mismatch is not None else f"no {MISMATCH}"
        log.warning("step %d does not show whether rollout engine and trainer have the same policy: %s", step, why)
    elif not mismatch <= MAX_FIRST_MISMATCH:
        # `not <=` instead of `>`, so that NaN counts as a mismatch, too.
        raise TrainingCollapsed(
            f"step {step}: rollout engine and trainer do not have the same policy: for the tokens of this run's first "
            f"step their log-probs differ by {mismatch:.4g} nats on average ({MISMATCH}; at most {MAX_FIRST_MISMATCH} "
            "is accepted, and bfloat16 alone makes 0.01 to 0.02). Training on such samples teaches noise. What to "
            "check: the weight sync (on GPUs: bash scripts/gpu/first_run.sh --stages 5), the number formats "
            "(actor_rollout_ref.rollout.dtype, actor.fsdp_config.mixed_precision), chat template and RoPE settings of "
            "the model's folder, quantized weights, and the attention backends, which the log names at the start. "
            "trainer.collapse_guard.max_mismatch sets a limit of your own in place of this one."
        )


class Recovery:
    """Acts on the guard's alarms. `compares_first`: the first step that it watches must pass `require_same_policy`."""

    def __init__(
        self,
        config: CollapseGuardConfig,
        checkpoints: Checkpoints,
        kl_weight: KLController,
        compares_first: bool = False,
    ) -> None:
        self.guard = CollapseGuard(config)
        self.checkpoints = checkpoints
        self.kl_weight = kl_weight
        self._first_kl_weight = kl_weight.value
        self._to_compare = compares_first
        self._metrics: Mapping[str, float] = {}
        self._alarm: Alarm | None = None
        self._num_watched = 0

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Take over guard and KL weight from the progress of the state that `checkpoints` has resumed.

        A weight is taken over only if it is adaptive and began with this run's coefficient (as in states that do not
        say so). Otherwise it is the configured one, also after a rollback to a step of the earlier run.
        """
        self.guard.load_state_dict(progress["guard"])
        weight = self.kl_weight
        if isinstance(weight, AdaptiveKL) and progress.get("kl_coef", weight.coef) == weight.coef:
            weight.value = progress["kl_weight"]
        else:
            self.checkpoints.kl_weights = dict.fromkeys(self.checkpoints.kl_weights, self._first_kl_weight)

    def watch(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Check a step's metrics. Returns the guard's own metrics, to be logged with them.

        Once the first alarms could be due, a limit without a metric is warned of: its run only looks healthy.
        """
        self._metrics = dict(metrics)
        self._alarm = self.guard.observe(metrics, step)
        self._num_watched += 1
        if self._num_watched == self.guard.config.patience:
            for name, metric in self.guard.not_seen().items():
                log.warning("trainer.collapse_guard.%s is not watched: no step so far has had %s", name, metric)
        return self.guard.metrics()

    def act(self, step: int) -> int | None:
        """Act on what `watch` found in this step. Returns the step whose weights were restored, None if none were.

        Raises TrainingCollapsed, which names the last good checkpoint, when the run should end.
        """
        if self._to_compare:
            self._to_compare = False
            require_same_policy(self._metrics, step)
        alarm = self._alarm
        if alarm is None:
            return None
        if alarm.action == "warn":
            log.warning("step %d: %s", step, alarm.message)
            return None
        good = good_checkpoint(self.checkpoints.steps, alarm.first_bad_step)
        if good is None:
            advice = (
                "No checkpoint is left from before that; set trainer.save_freq, or a larger trainer.max_ckpt_to_keep."
            )
            raise TrainingCollapsed(f"step {step}: {alarm.message} {advice}")
        if alarm.action == "stop":
            advice = f"The last good checkpoint is {self.checkpoints.path('actor', good)}."
            raise TrainingCollapsed(f"step {step}: {alarm.message} {advice}")
        log.warning("step %d: %s Going back to step %d with half the learning rate.", step, alarm.message, good)
        self.checkpoints.load(good)
        self.checkpoints.actor.scale_lr(LR_FACTOR)
        if self.checkpoints.critic is not None:
            self.checkpoints.critic.scale_lr(LR_FACTOR)
        # An adaptive weight followed the KL of the collapsed policy.
        self.kl_weight.value = self.checkpoints.kl_weights.get(good, self._first_kl_weight)
        self.guard.reset()
        return good
