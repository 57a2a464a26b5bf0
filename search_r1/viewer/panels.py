"""Which metrics the dashboard draws, and in which panel."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from search_r1.viewer.run_settings import RunSettings

COLUMN = "advantages"  # of tokens, verl.tracking.trajectory_columns
EPSILON = 1e-6  # as in verl.algorithms.advantages.inputs


@dataclass(frozen=True)
class Panel:
    """A chart. `pattern` must match the whole name of a metric; its group, if any, is the metric's name in the legend.

    `stacked`: the series are parts of a whole. `unit` is that of the axis, "" for a plain number.
    """

    key: str
    title: str
    pattern: re.Pattern[str]
    unit: str = ""
    stacked: bool = False

    def label(self, metric: str) -> str:
        """The metric's name without the part that all metrics of the panel share."""
        found = self.pattern.fullmatch(metric)
        return " ".join(part for part in found.groups() if part) if found and found.lastindex else metric


def _panel(key: str, title: str, pattern: str, unit: str = "", stacked: bool = False) -> Panel:
    return Panel(key, title, re.compile(pattern), unit, stacked)


OUTSIDE_STEP = "step|testing|testing_ref_policy|save_checkpoint"
PANELS = (
    _panel("reward", "Reward of the sampled trajectories", r"critic/score/mean"),
    _panel("val_reward", "Validation and test reward by set", r"(val_ref|val|test)/test_score/(.+)"),
    _panel("val_exact_match", "Validation and test exact match by set", r"(val_ref|val|test)/reward/(.+)/exact_match"),
    _panel("components", "Reward components of the sampled trajectories", r"reward/([^/]+)"),
    _panel(
        "searches", "Searches per trajectory", r"env/number_of_valid_search|(val|test)/searches_per_question/(mean)"
    ),
    _panel("lengths", "Tokens per trajectory", r"(policy_length|response_length)/mean", "tokens"),
    _panel("kl", "KL", r"actor/(kl_loss|ppo_kl)|critic/(kl)", "nats"),
    _panel("entropy", "Entropy", r"(?:health|actor)/(entropy|entropy_loss)", "nats"),
    _panel("mismatch", "Mismatch of sampler and trainer", r"health/mismatch/(mean_abs|max_abs|k3)", "nats"),
    _panel("grad_norm", "Gradient norm", r"(actor|critic)/grad_norm"),
    _panel(
        "health",
        "Health",
        r"health/(invalid_action_ratio|repetition|empty_think_ratio|zero_variance_groups|zero_advantages)",
        "share",
    ),
    _panel("failed", "Failed and cut trajectories", r"(env/failed_ratio|response_length/clip_ratio)", "share"),
    _panel("phases", "Time of a step by phase", rf"timing_s/((?!(?:{OUTSIDE_STEP})$).+)", "s", stacked=True),
    _panel("outside", "Time beside the steps", r"timing_s/(testing|testing_ref_policy|save_checkpoint)", "s"),
    _panel("throughput", "Tokens per second and device", r"perf/(throughput)", "tokens/s"),
    _panel("retriever_rate", "Retriever queries per second", r"perf/retriever/(queries_per_s)", "queries/s"),
    _panel("retriever_latency", "Retriever latency", r"perf/retriever/(p50_ms|p99_ms)", "ms"),
    _panel("idle", "Idle time", r"perf/(.+)_share", "share"),
    _panel("staleness", "Staleness of the weights that sampled", r"rollout/staleness/(mean|max)", "steps"),
)
GUARD = "health/guard/"
ALARM = f"{GUARD}alarm"


def metrics_of(panel: Panel, names: Iterable[str]) -> list[str]:
    """The metrics among `names` that belong to the panel, in order."""
    return [name for name in names if panel.pattern.fullmatch(name)]


def kind_of(metric: str) -> str:
    """The kind of trajectories that a metric measures, as in their file names."""
    prefix = metric.partition("/")[0]
    return prefix if prefix in ("val", "val_ref", "test") else "train"


# Advantages of the samples of a group: those in the file, or else recomputed from the stored rewards if that can be
# done exactly.


def group_advantages(rewards: Sequence[float | None], settings: RunSettings) -> tuple[list[float | None], str]:
    """One advantage per sample, and the formula; no numbers and "" if the run used another estimator.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): (R - mean) / (std + 1e-6) with the unbiased std of the group,
    or R - mean without `norm_adv_by_std_in_grpo`. The samples that failed (None) are left out; one that is left alone
    has advantage 0. A KL in the reward or scaling by the batch cannot be recomputed from one group.
    """
    # What cannot be recomputed from the rewards of one group.
    nothing: list[float | None] = [None] * len(rewards)
    whole = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if settings.setting("algorithm.adv_estimator") != "grpo" or not whole:
        return nothing, ""
    if settings.setting("algorithm.use_kl_in_reward") or settings.setting("algorithm.norm_adv_by_batch_std"):
        return nothing, ""

    # The mean is computed from the least reward, so that equal rewards have exactly their own value as mean.
    low = min(whole)
    mean = low + sum(reward - low for reward in whole) / len(whole)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in whole) / max(1, len(whole) - 1))

    scaled = bool(settings.setting("algorithm.norm_adv_by_std_in_grpo", True))
    divisor = std + EPSILON if scaled else 1.0
    formula = "(reward - mean) / (std + 1e-6)" if scaled else "reward - mean"
    return [None if reward is None else (reward - mean) / divisor for reward in rewards], formula


def stored_advantages(columns: Sequence[Sequence[float | None] | None]) -> tuple[list[float | None], str]:
    """One advantage per sample, from the `advantages` of its tokens (None if not trained on), and how it was computed.

    With GRPO, all tokens of a sample have the same advantage; with GAE or a KL in the reward, it is their mean.
    """
    known = [[value for value in column or () if value is not None] for column in columns]
    equal = all(len(set(values)) <= 1 for values in known)
    how = "as the loss saw it" if equal else "the mean over its tokens, as the loss saw them"
    return [(values[0] if equal else sum(values) / len(values)) if values else None for values in known], how
