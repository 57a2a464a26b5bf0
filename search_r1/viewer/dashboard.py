"""The data of the dashboard: which metrics it draws, in which panel, the metrics of runs grouped by configuration, and
the timeline of a step.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from search_r1.viewer.runs import Run, RunSettings
from verl.errors import DataError
from verl.tracking.changed_settings import changed_settings
from verl.tracking.jsonl_backend import FILE_NAME
from verl.tracking.run_data import Curve, RunData, load_run
from verl.tracking.spans import FOLDER

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


Row = dict[str, Any]

SEEDS = frozenset({"trainer.seed", "data.seed"})
"""If runs differ in no other setting that may change what is learned, they are seeds of one configuration."""
MAX_POINTS = 2000  # of a curve, about: a chart has fewer pixels
ROUNDING_S = 1e-6  # more than the times of a timeline's file are rounded by
_TIMELINE = re.compile(r"step_(\d+)\.json")
Stamp = tuple[int, int]


@dataclass(frozen=True)
class Measured:
    """A run with its metrics, which are empty before its first step."""

    run: Run
    data: RunData


def version_of(runs: Sequence[Run]) -> str:
    """A value that changes whenever a run logs a step or writes a timeline."""
    stamps = [_stamp(run.folder / name) for run in runs for name in (FILE_NAME, FOLDER)]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def dashboard(runs: Sequence[Run], by_seed: bool) -> Row:
    """Panels with their series. With `by_seed`, the runs of one configuration form one series with a band.

    A series of many steps is thinned to about MAX_POINTS. Raises DataError for metrics that cannot be read.
    """
    measured = [Measured(run, _metrics(run)) for run in runs]
    groups = _configurations(measured) if by_seed else [[one] for one in measured]
    named = [(group, list(dict.fromkeys(name for one in group for name in one.data.names("")))) for group in groups]
    return {
        "version": version_of(runs),
        "runs": [_summary(one) for one in measured],
        "groups": [{"label": _label(group), "runs": [one.run.name for one in group]} for group in groups],
        "panels": list(_panels(named)),
        "alarms": [alarm for one in measured for alarm in alarms_of(one)],
    }


def timeline(run: Run, step: int) -> Row:
    """Rows of spans, in seconds from the first one; `depth` is the number of spans in the row that enclose a span.

    Raises DataError if the run has no timeline of this step.
    """
    path = run.folder / FOLDER / f"step_{step}.json"
    try:
        rows = _rows(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: the run was made with trainer.save_timeline=False, or moved") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the timeline of a step ({error!r}); remove it") from error
    ends = [one["start"] + one["seconds"] for row in rows for one in row["spans"]]
    return {"run": run.name, "step": step, "seconds": max(ends, default=0.0), "rows": rows}


def alarms_of(one: Measured) -> list[Row]:
    """The steps in which the collapse guard raised an alarm, with the conditions that held."""
    found = []
    for step, row in one.data.metrics.items():
        held = {name: int(row[name]) for name in row if name.startswith(GUARD) and math.isfinite(row[name])}
        if held.pop(ALARM, 0):
            conditions = {name.removeprefix(GUARD): steps for name, steps in held.items() if steps}
            found.append({"run": one.run.name, "step": step, "conditions": conditions})
    return found


def _rows(events: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row of spans for each thread that the events of a timeline name."""
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    spans = sorted((one for one in events if one["ph"] == "X"), key=lambda one: (one["tid"], one["ts"], -one["dur"]))
    return [{"name": names[tid], "spans": _nested(list(row))} for tid, row in groupby(spans, lambda one: one["tid"])]


def _nested(spans: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Spans in order of their start; an inner one begins before the outer one ends."""
    open_ends: list[float] = []
    found = []
    for span in spans:
        start, seconds = span["ts"] / 1e6, span["dur"] / 1e6
        while open_ends and open_ends[-1] <= start + ROUNDING_S:
            open_ends.pop()
        found.append({"name": span["name"], "start": start, "seconds": seconds, "depth": len(open_ends)})
        open_ends.append(start + seconds)
    return found


def _panels(named: Sequence[tuple[Sequence[Measured], Sequence[str]]]) -> Iterator[Row]:
    """The panels that have a series. `named`: each group of runs, with the names of its metrics."""
    for panel in PANELS:
        series = [one for group, names in named for one in _series(panel, group, metrics_of(panel, names))]
        if series:
            about = {"key": panel.key, "title": panel.title, "unit": panel.unit, "stacked": panel.stacked}
            yield {**about, "series": series}


def _series(panel: Panel, group: Sequence[Measured], metrics: Sequence[str]) -> Iterable[Row]:
    """The series of a group of runs in a panel, one for each metric.

    The parts of a stack keep the same steps: where one part is missing, the whole would be too low.
    """
    # The steps of the whole stack, thinned once for all of its parts.
    curves_of = {metric: [one.data.curve(metric) for one in group] for metric in metrics}
    stack = set(_thinned(_steps(curve for curves in curves_of.values() for curve in curves)))
    # Each metric: the mean over the runs that have the step, and for several runs the band from least to most.
    for metric, curves in curves_of.items():
        steps = _steps(curves)
        steps = [step for step in steps if step in stack] if panel.stacked else _thinned(steps)
        if not steps:
            continue
        values = [[curve[step] for curve in curves if step in curve] for step in steps]
        band = len(group) > 1
        yield {
            "metric": metric,
            "label": panel.label(metric),
            "group": _label(group),
            "runs": [one.run.name for one in group],
            "kind": kind_of(metric),
            "steps": steps,
            "mean": [fmean(seeds) for seeds in values],
            "low": [min(seeds) for seeds in values] if band else None,
            "high": [max(seeds) for seeds in values] if band else None,
            "num_runs": [len(seeds) for seeds in values],
        }


def _steps(curves: Iterable[Curve]) -> list[int]:
    return sorted(set().union(*curves))


def _thinned(steps: list[int]) -> list[int]:
    """About MAX_POINTS of the steps, evenly, with the first and the last; of 1, 2, 3, ... the multiples of a number."""
    stride = -(-len(steps) // MAX_POINTS)
    return steps if stride <= 1 else [steps[0], *steps[stride - 1 : -1 : stride], steps[-1]]


def _configurations(measured: Sequence[Measured]) -> list[list[Measured]]:
    groups: list[list[Measured]] = []
    for one in measured:
        home = next((group for group in groups if _differ_by_seed(group[0].data.config, one.data.config)), None)
        if home is None:
            groups.append([one])
        else:
            home.append(one)
    return groups


def _differ_by_seed(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if not one or not other:  # a run whose configuration is not known stays alone
        return False
    return all(change.harmless or change.key in SEEDS for change in changed_settings(one, other))


def _label(group: Sequence[Measured]) -> str:
    first = group[0].run.name
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more"


def _summary(one: Measured) -> Row:
    steps = list(one.data.metrics)
    folder = one.run.folder / FOLDER
    files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return {
        "name": one.run.name,
        "last_step": steps[-1] if steps else None,
        "total_steps": one.data.setting("trainer.total_training_steps"),
        "timelines": sorted(int(found[1]) for found in map(_TIMELINE.fullmatch, files) if found),
    }


def _metrics(run: Run) -> RunData:
    path = run.folder / FILE_NAME
    stamp = _stamp(path)
    if not run.path.is_dir() or stamp is None:
        return RunData(run.folder, {}, {})
    return _newest(run.folder).at(stamp)


@dataclass
class _Newest:
    """The metrics of a run as its file was last read; what was read before is let go."""

    folder: Path
    read: tuple[Stamp, RunData] | None = None

    def at(self, stamp: Stamp) -> RunData:
        """Read again if the file has another `stamp`."""
        read = self.read
        if read is None or read[0] != stamp:
            read = self.read = stamp, load_run(self.folder, may_be_empty=True)
        return read[1]


@lru_cache(maxsize=16)
def _newest(folder: Path) -> _Newest:
    """The metrics of the run in `folder`: one object for each of the runs that were last asked for."""
    return _Newest(folder)


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
