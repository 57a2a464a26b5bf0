"""Training runs of two steps, and what their metrics say: sound or not, memory by phase, tokens a second."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from first_run.result import Outcome, Result, judged
from first_run.site import Site, StageError
from verl.errors import DataError
from verl.phases import Phase
from verl.tracking.run_data import RunData, load_run

STEPS = 2
LIMIT_S = 3600.0
DRY_RUN_S = 900.0
DRY_RUN_LINE = re.compile(rf"^({'|'.join(Phase)})\s+(\d+\.\d+)", re.MULTILINE)
CLOSE = 0.05  # nats between sampler and trainer, on average
MISMATCH = "health/mismatch/mean_abs"
ROLE = "actor_rollout_ref"


@dataclass(frozen=True)
class Prediction:
    """Of the dry run: GiB of a device by phase."""

    fits: bool
    words: str
    gib: dict[str, float]


def tinywiki(site: Site, num_devices: int, tensor_parallel: int, url: str) -> Result:
    """TinyWiki's settings, after a short warm start; each engine has `tensor_parallel` of the devices."""
    world, run_dir = site.world(), site.scratch / f"run_{site.stage}"
    settings = [
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/validation.parquet",
        f"{ROLE}.model.path={site.policy()}",
        f"{ROLE}.actor.use_rollout_log_probs=false",  # so that both log-probs are there to be compared
        f"{ROLE}.actor.entropy_coeff=0.01",  # a gradient where all rewards are 0
        f"{ROLE}.rollout.dtype={'bfloat16' if site.on_gpu else 'float32'}",
        f"trainer.device={site.device}",
        f"trainer.n_gpus_per_node={num_devices}",
        f"{ROLE}.rollout.tensor_model_parallel_size={tensor_parallel}",
        *common(run_dir, url),
    ]
    if not site.on_gpu:
        settings += ["data.train_batch_size=6", f"{ROLE}.rollout.n_agent=4", f"{ROLE}.actor.ppo_mini_batch_size=24"]
        settings += ["max_turns=2", f"{ROLE}.rollout.max_num_seqs=32", f"{ROLE}.rollout.kv_cache_gib=0.25"]
    arguments = ["--config-name", "tinywiki", *settings]
    prediction = predicted(site, [sys.executable, "-m", "verl.trainer.dry_run", *arguments])
    site.run("training", [sys.executable, "-m", "verl.trainer.main_ppo", *arguments], LIMIT_S, cwd=site.scratch)
    return judge_run(run_dir, prediction, searches=True)


def common(run_dir: Path, url: str) -> list[str]:
    """Two steps, no more validation than at the end, and all metrics in the run folder."""
    return [
        f"retriever.url={url}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.logger=[console]",
        "data.val_data_num=8",
        f"trainer.default_local_dir={run_dir}",
    ]


def predicted(site: Site, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Prediction:
    """What a dry run prints; 1 is its exit status when a run does not fit. Raises StageError when it says nothing."""
    return understood(site.run("dry_run", command, DRY_RUN_S, variables, site.scratch, accepted=(0, 1)))


def understood(text: str) -> Prediction:
    """Its table of phases, and its verdict in the last line."""
    gib = {phase: float(number) for phase, number in DRY_RUN_LINE.findall(text)}
    words = text.strip().splitlines()[-1] if text.strip() else ""
    if not gib:
        raise StageError(f"the dry run says: {words}")
    return Prediction(words.startswith(("ok", "warn")), words, gib)


def judge_run(run_dir: Path, prediction: Prediction, searches: bool) -> Result:
    """PASS when both steps are there, sampler and trainer agree, no trajectory failed, and all numbers are finite.

    `searches`: the policy is one that has learned to search, so it has to.
    """
    try:
        run = load_run(run_dir)
    except DataError as error:
        raise StageError(str(error)) from error
    problems = list(unsound(run))
    if searches and not any(run.curve("env/number_of_valid_search").values()):
        problems.append("nothing was searched for")
    details = "\n".join([*memory_table(run, prediction), "", *speed_table(run)])
    if problems:
        return Result(Outcome.FAIL, "; ".join(problems), details)
    last = run.metrics[STEPS]
    figures = f"{speed(last, 'gen')} tokens/s sampled, {speed(last, 'update_actor')} trained"
    figures += f", {last['timing_s/step']:.1f} s a step; log-probs {last[MISMATCH]:.1e} nats apart"
    figures += f"; {last['env/number_of_valid_search']:.2f} searches a trajectory" if searches else ""
    return judged(True, figures, details)


def unsound(run: RunData) -> Iterator[str]:
    for step in range(1, STEPS + 1):
        row = run.metrics.get(step, {})
        if "timing_s/step" not in row:
            yield f"step {step} was not logged"
            continue
        yield from (f"{name} of step {step} is not finite" for name, value in row.items() if not math.isfinite(value))
        if row["env/failed_ratio"] > 0:
            yield f"{row['env/failed_ratio']:.0%} of the trajectories of step {step} failed"
        if not row.get(MISMATCH, math.inf) < CLOSE:
            yield f"step {step}: sampler and trainer disagree by {row.get(MISMATCH, math.nan):.2g} nats on average"


def memory_table(run: RunData, prediction: Prediction) -> Iterator[str]:
    """The most of both steps; what roles have is of their own processes, on a GPU as PyTorch's allocator holds it."""
    yield f"Dry run: {prediction.words}"
    yield ""
    yield "| phase | device, GiB | dry run, GiB | actor, GiB |"
    yield "|---|---|---|---|"
    for phase in Phase:
        measured = (most(run, f"memory_gib/{phase}/{what}") for what in ("device", "actor"))
        device, actor = ("-" if value is None else f"{value:.2f}" for value in measured)
        dry = f"{prediction.gib[phase]:.2f}" if phase in prediction.gib else "-"
        yield f"| {phase} | {device} | {dry} | {actor} |"


def speed_table(run: RunData) -> Iterator[str]:
    yield "| step | s | sampled tokens/s | trained tokens/s | s of weight sync |"
    yield "|---|---|---|---|---|"
    for step in range(1, STEPS + 1):
        row = run.metrics.get(step, {})
        if "timing_s/step" in row:
            rates = f"{speed(row, 'gen')} | {speed(row, 'update_actor')}"
            yield f"| {step} | {row['timing_s/step']:.1f} | {rates} | {row['timing_s/weight_sync']:.2f} |"


def speed(row: dict[str, float], phase: str) -> str:
    milliseconds = row.get(f"timing_per_token_ms/{phase}")
    return f"{1000 / milliseconds:.0f}" if milliseconds else "?"


def most(run: RunData, name: str) -> float | None:
    return max(run.curve(name).values(), default=None)
