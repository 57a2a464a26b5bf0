"""The terminal: a progress bar, and one compact line per step with the numbers to watch."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from long_task import Progress, duration
from verl.process.storage import writing
from verl.tracking.backend import RunInfo

WATCHED = (
    ("critic/score/mean", "reward", ".3f"),
    ("reward/exact_match", "em", ".3f"),
    ("actor/pg_loss", "pg", ".4f"),
    ("actor/kl_loss", "kl", ".4f"),
    ("actor/entropy_loss", "entropy", ".3f"),
    ("actor/grad_norm", "grad", ".3f"),
    ("env/number_of_valid_search", "searches", ".2f"),
    ("agent/call_status/ok", "calls", ".2f"),
    ("env/finish_ratio", "finished", ".2f"),
    ("response_length/mean", "tokens", ".0f"),
    ("timing_s/step", "s", ".1f"),
)
"""The metrics on a step's line: the name of each, its short name on the line, and its format."""
SCORES = (("critic/score/mean", "reward"), ("reward/exact_match", "em"), ("val/test_score/mean", "val"))
"""The metrics that the bar shows: the name of each, and its short name."""
SCORE_INFIX = "/test_score/"
TIMING = "timing_s/"
OUTSIDE = {f"{TIMING}{name}" for name in ("step", "testing", "testing_ref_policy", "save_checkpoint")}
"""Timings that are no part of a step."""
SMALLEST_SHARE = 0.01  # of a step's time, to be on its line


class ConsoleBackend:
    """Prints a line for every `log`, with the remaining time; on a terminal, a bar stays below the lines.

    The bar shows the latest reward, exact match and validation score, then the current phase of the run, which a
    narrow terminal cuts first.
    """

    def __init__(self, run: RunInfo, console: Console | None = None) -> None:
        self._console = console
        self._total_steps = run.total_steps
        self._bar = Progress(run.experiment, run.total_steps, unit="steps", lines=False, console=console)
        self._phase, self._scores = "", dict[str, float]()
        self._has_begun = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._scores |= {name: metrics[name] for name, _ in SCORES if name in metrics}
        if not self._has_begun:  # what was before is loading, or the steps of an earlier start
            self._has_begun = True
            self._bar.begin(max(0, step - 1), metrics.get(f"{TIMING}step", 0.0))
        # The bar goes first, since the line ends with the time left that it estimates.
        self._bar.reach(step)
        self._show()
        line = compact_line(metrics, step, self._total_steps)
        if left := self._bar.seconds_left():
            line += f" | {duration(left)} left"
        with writing("standard output"):  # a file on a full disk, say
            if self._console is None:
                print(line, flush=True)
            else:
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def now_in(self, phase: str) -> None:
        self._phase = phase
        self._show()

    def finish(self, failed: bool = False) -> None:
        with writing("standard output"):
            self._bar.close()

    def _show(self) -> None:
        scores = (f"{short} {self._scores[name]:.3f}" for name, short in SCORES if name in self._scores)
        self._bar.update(0, note=", ".join(filter(None, [*scores, self._phase])))


def compact_line(metrics: Mapping[str, float], step: int, total_steps: int | None = None) -> str:
    """`step 3/80 | reward 0.412 | kl 0.0031 | ...`; validation scores follow, failures only if there were any."""
    parts = [f"step {step}" + (f"/{total_steps}" if total_steps else "")]
    parts += [f"{short} {metrics[name]:{form}}" for name, short, form in WATCHED if name in metrics]
    parts += [f"{name.replace(SCORE_INFIX, ' ')} {value:.3f}" for name, value in metrics.items() if SCORE_INFIX in name]
    parts += [f"{name} {value:.3f}" for name, value in metrics.items() if name.endswith("/failed_ratio") and value > 0]
    parts += filter(None, [_where_time_went(metrics)])
    return " | ".join(parts)


def _where_time_went(metrics: Mapping[str, float]) -> str:
    """The shares of a step's time, the longest first: `gen 41% update_actor 38% old_log_prob 12%, driver alone 3%`."""
    step_s = metrics.get(f"{TIMING}step")
    if not step_s:
        return ""
    names = (name for name in metrics if name.startswith(TIMING) and name not in OUTSIDE)
    shares = sorted(((metrics[name] / step_s, name.removeprefix(TIMING)) for name in names), reverse=True)
    text = " ".join(f"{name} {share:.0%}" for share, name in shares if share >= SMALLEST_SHARE)
    alone = metrics.get("perf/driver_share")
    return text if alone is None else f"{text}, driver alone {alone:.0%}"
