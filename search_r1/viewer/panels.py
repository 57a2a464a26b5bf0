"""Which metrics the dashboard draws, and in which panel."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


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
    _panel("val_reward", "Validation reward by set", r"(val_ref|val|test)/test_score/(.+)"),
    _panel("val_exact_match", "Exact match by set", r"(val_ref|val|test)/reward/(.+)/exact_match"),
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
    """Those of `names` that belong to the panel, in order."""
    return [name for name in names if panel.pattern.fullmatch(name)]


def kind_of(metric: str) -> str:
    """The kind of trajectories that a metric measures, as in their file names."""
    prefix = metric.partition("/")[0]
    return prefix if prefix in ("val", "val_ref", "test") else "train"
