"""The entire loop for three steps: Ray, vLLM, retrieval server, FSDP2, sync, validation, checkpoint, report.

It is the run of the quickstart's rehearsal. Runs that are compared with it are led from this process.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from e2e_world import ENV, ROOT, metrics_by_step, run_here, small_run
from runs_on_hosts import OneHost
from same_runs import assert_same_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_r1.viewer.dashboard import PANELS, metrics_of
from verl.run.run_folder import LOCK, archive
from verl.tracking.backend import RunInfo
from verl.tracking.prometheus_backend import LatestMetrics
from verl.tracking.trajectory_store import read_trajectories

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(ray_session: object, tinywiki: Path, policy: Path, tinywiki_url: str) -> Train:
    """Runs in a folder, with further overrides; returns the folder."""

    def to_its_end(folder: Path, *overrides: str) -> Path:
        assert run_here(*small_run(tinywiki, policy, tinywiki_url, folder, "trainer.seed=1", *overrides)) == 0
        return folder

    return to_its_end


@pytest.fixture
def run_dir(quickstart: Path) -> Path:
    return quickstart / "rl"


def test_the_start_is_told_phase_by_phase_and_nothing_that_nobody_can_act_on(quickstart: Path) -> None:
    """Also from the workers, whose lines are among them."""
    said = (quickstart / "stderr").read_text().partition(" step 60/60 ")[2].partition("\n")[2]
    said = re.split(r"^\[ *\d+ s\] ", said, maxsplit=1, flags=re.MULTILINE)[0]  # what follows is from infer.py
    lines = [line for line in said.splitlines() if not line.endswith(" s so far")]
    told = [re.fullmatch(r"\d\d:\d\d:\d\d INFO verl.process.startup: \[ *\d+ s\] (.*)", line) for line in lines]
    assert all(told), [line for line, found in zip(lines, told, strict=True) if not found]
    assert [found[1] for found in told if found] == [
        "the config is valid",
        "checking prompt files, reward, models and environment",
        "loading the prompts",
        "loads policy 0.75 M, anchor 0.75 M parameters",
        "importing Ray and the trainer",
        "starting Ray",
        "prompts: 120 for training, 32 for validation",
        "layout: 1 training rank and 1 engine on CPU",
        "starting 1 rollout engine",
        "loading the actor in 1 process",
        "waiting for 1 rollout engine",
        "attention: CPU_ATTN in the rollout engine, PyTorch's scaled_dot_product_attention, row by row in the trainer",
        "validating on 32 prompts",
        "testing on 40 prompts",
        "step 1 of 3",
        "validating on 32 prompts",
        "validating on 32 prompts",
        "testing on 40 prompts",
    ]


def test_metrics_of_every_step(run_dir: Path) -> None:
    steps = metrics_by_step(run_dir)
    assert sorted(steps) == [0, 1, 2, 3]
    for name in ("val/test_score/mean", "val/num_questions"):
        assert [step for step in steps if name in steps[step]] == [0, 2, 3], name
    for step in (1, 2, 3):
        for name in (
            *("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr", "critic/score/mean", "env/finish_ratio"),
            *(
                "response_length/mean",
                "state_tokens/coverage",
                "timing_s/gen",
                "timing_s/update_actor",
                "timing_s/step",
            ),
            *(
                "env/number_of_valid_search",
                "ref_policy/ema_tau",
                "timing_s/update_ref_policy_ema",
                "global_seqlen/mean",
            ),
        ):
            assert math.isfinite(steps[step][name]), name
        for phase in ("sample", "update", "sync"):  # the log-probs are the sampler's
            assert 0.1 < steps[step][f"memory_gib/{phase}/actor"] < 16, phase
        assert steps[step]["env/failed_ratio"] == 0 and steps[step]["rollout/staleness/max"] == 0
        assert steps[step]["health/mismatch/mean_abs"] < 1e-4 and steps[step]["health/entropy"] > 0  # from the update
        assert "timing_s/old_log_prob" not in steps[step]
        assert steps[step]["perf/time_per_step"] == steps[step]["timing_s/step"]
        for name in ("engine_idle", "rollout_idle", "driver"):
            assert 0 <= steps[step][f"perf/{name}_share"] < 1, name


def test_the_dashboards_draw_what_a_run_logs(run_dir: Path) -> None:
    """Each panel of the viewer and each query of Grafana has a metric of a real run behind it."""
    logged = {name: value for row in metrics_by_step(run_dir).values() for name, value in row.items()}
    without = {panel.key for panel in PANELS if not metrics_of(panel, logged)}
    assert without == set()
    exported = {family.name for family in latest(logged).collect()}
    panels = json.loads((ROOT / "configs/grafana_dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    for query in queries:
        [wanted] = re.findall(r'__name__=~"(.+?)"', query) or re.findall(r"\b(verl_\w+)", query)
        assert any(re.fullmatch(wanted, name) for name in exported), query


def latest(logged: dict[str, float]) -> LatestMetrics:
    metrics = LatestMetrics(RunInfo("project", "experiment", Path(), {}))
    metrics.update(logged, 3)
    return metrics


def test_a_timeline_has_what_driver_engine_and_rank_did(run_dir: Path) -> None:
    steps = metrics_by_step(run_dir)
    for step in (1, 2, 3):
        events = json.loads((run_dir / "timeline" / f"step_{step}.json").read_text())["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        spans = [(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in events if "dur" in event]
        done = {(who, what) for who, what, _, _ in spans}
        assert {
            ("driver", "gen"),
            ("engine 0", "rollouts"),
            ("engine 0", "generate"),
            ("actor 0", "update_and_score"),
        } <= done
        [(_, _, start, length)] = [span for span in spans if span[1] == "step"]
        assert length / 1e6 == pytest.approx(steps[step]["timing_s/step"], abs=1e-3)
        for who, what in (("engine 0", "generate"), ("actor 0", "update_and_score")):
            times = [(ts, dur) for *span, ts, dur in spans if span == [who, what]]
            assert any(start <= ts and ts + dur <= start + length for ts, dur in times), "on one clock"


def test_trajectories_are_what_was_sampled(run_dir: Path, policy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    rows = read_trajectories(run_dir / "trajectories" / "train_step_2.parquet")
    assert len(rows) == 24 and len({row["group_id"] for row in rows}) == 6
    assert sum(row["num_searches"] for row in rows) > 0
    for row in rows:
        lengths = {source: 0 for source in ("prompt", "policy", "environment")}
        position = 0
        for segment in row["segments"]:
            span = slice(position, position := position + segment["num_tokens"])
            lengths[segment["source"]] += segment["num_tokens"]
            assert set(row["loss_mask"][span]) <= {segment["source"] == "policy"}
            assert tokenizer.decode(row["ids"][span]) == segment["text"]
        assert position == len(row["ids"]) and sum(row["loss_mask"]) == lengths["policy"] > 0
        assert all(value < 0 for value, trained in zip(row["log_probs"], row["loss_mask"], strict=True) if trained)
        observations = [s["text"] for s in row["segments"] if s["source"] == "environment"]
        assert all(text.count("<information>") == text.count("</information>") for text in observations)
        assert row["weight_version"] == 1


def test_stored_trajectories_can_be_replayed(
    run_dir: Path, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint that sampled a step gives its log-probs again, the reward its scores; SFT takes the export."""

    def printed(*command: str) -> str:
        assert run_here("-m", *command) == 0
        return capsys.readouterr().out

    replay, step_1, step_3 = "search_r1.replay.__main__", *(stored(run_dir, step) for step in (1, 3))
    for file, model in ((step_1, policy), (step_3, run_dir / "actor" / "global_step_2")):
        output = tmp_path / "log_probs.parquet"
        said = printed(replay, "log_probs", str(file), "--model", str(model), "--output", str(output))
        assert float(said.split("largest difference")[1].split()[0]) < 1e-4
    files, scored = (str(step_1), str(step_3)), tmp_path / "scored.parquet"
    rule = ("--reward", "search_r1.rewards.exact_match.ExactMatchReward", "--template", "tinywiki")
    printed(replay, "score", *files, "--tokenizer", str(policy), *rule, "--output", str(scored))
    columns = ["ids", "reward", "reward_components"]
    assert read_trajectories(scored, columns) == [row for file in files for row in read_trajectories(file, columns)]
    rows = tmp_path / "sft.parquet"
    kept = printed(replay, "export", *files, "--min_reward", "0", "--per_prompt", "2", "--output", str(rows))
    assert 0 < int(kept.split()[1]) <= 24
    printed(
        *("verl.trainer.sft", "--config-name", "tinywiki_sft", f"data.train_files={rows}"),
        *(f"model.path={policy}", f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=1"),
        "data.lm_fraction=0",
    )
    assert (tmp_path / "global_step_1" / "config.json").is_file()


def stored(folder: Path, step: int) -> Path:
    return folder / "trajectories" / f"train_step_{step}.parquet"


def test_checkpoint_is_a_model_like_any_other(run_dir: Path, policy: Path) -> None:
    assert sorted(path.name for path in (run_dir / "actor").iterdir()) == ["global_step_2", "global_step_3"]
    before = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run_dir / "actor" / "global_step_3").state_dict()
    anchor = AutoModelForCausalLM.from_pretrained(run_dir / "ref" / "global_step_3").state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    moved, followed = (after[name] - before[name]).norm(), (anchor[name] - before[name]).norm()
    assert moved > 0 and 0 < followed < moved


def test_report_can_be_read(run_dir: Path) -> None:
    report = (run_dir / "report.md").read_text()
    assert "tinywiki_2hop" in report and "report.png" in report
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")


def test_two_workers_and_two_engines_do_the_same(run_dir: Path, one_host: OneHost) -> None:
    """The first step of the same run on other plumbing: the same trajectories, token by token, the same gradient."""
    other = one_host.short_run_with(2)
    columns = ["ids", "loss_mask", "log_probs", "reward"]
    paths = [folder / "trajectories" / "train_step_1.parquet" for folder in (run_dir, other)]
    assert read_trajectories(paths[0], columns) == read_trajectories(paths[1], columns)
    one, two = (metrics_by_step(folder)[1] for folder in (run_dir, other))
    assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4) and one["actor/grad_norm"] > 1e-4
    assert two["actor/entropy_loss"] == pytest.approx(one["actor/entropy_loss"], rel=1e-5)
    assert_tokens_of_ranks(one, paths[0], 1)
    assert_tokens_of_ranks(two, paths[1], 2)


def test_a_policy_that_sums_up_is_trained_on_what_it_read(train: Train, tmp_path: Path) -> None:
    """A window so small that a first result is held back: sampler and trainer see the same sequences."""
    folder = train(
        tmp_path / "run",
        *("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        *("retriever.topk=4", "data.max_obs_length=64", "data.max_start_length=64", "agent.max_summary_length=16"),
        *(
            "agent.compact_at=145",
            "agent.max_compactions=2",
            "agent.summary_request='Sum up.'",
            "agent.feedback=Neither.",
        ),
        "actor_rollout_ref.actor.use_rollout_log_probs=false",
    )
    rows = [row for step in (1, 2) for row in read_trajectories(stored(folder, step))]
    summed_up = [row for row in rows if any(event.get("is_summary") for event in row["events"])]
    assert len(summed_up) > 4
    for row in summed_up:
        sources, said = zip(*((segment["source"], segment["text"]) for segment in row["segments"]), strict=True)
        place = sources.index("context")
        assert (
            sources[place - 3 : place] == ("policy", "environment", "policy") and said[place - 2] == "\n\nSum up.\n\n"
        )
        held_back = next(event["reply_after_summary"] for event in row["events"] if "reply_after_summary" in event)
        assert said[place].startswith(said[0]) and said[place].endswith(held_back)
        both = zip(row["loss_mask"], row["log_probs"], row["old_log_probs"], strict=True)
        assert all(abs(sampled - trained) < 2e-3 for is_trained, sampled, trained in both if is_trained)
    logged = metrics_by_step(folder)
    for step in (1, 2):
        played = read_trajectories(stored(folder, step))
        number = sum(bool(event.get("is_summary")) for row in played for event in row["events"]) / len(played)
        assert logged[step].get("env/number_of_summaries", 0) == pytest.approx(number) and number <= 2
    assert all(math.isfinite(logged[step]["actor/grad_norm"]) for step in (1, 2))


def assert_tokens_of_ranks(metrics: dict[str, float], stored: Path, num_ranks: int) -> None:
    """`global_seqlen/*` of a batch dealt out in order, and balanced: no rank is ahead by more than one row."""
    lengths = [len(row["ids"]) for row in read_trajectories(stored, ["ids"])]
    share = len(lengths) // num_ranks
    dealt = [sum(lengths[rank * share : (rank + 1) * share]) for rank in range(num_ranks)]
    names = ("min", "max", "minmax_diff", "mean")
    found = [metrics[f"global_seqlen/{name}"] for name in names]
    assert found == [min(dealt), max(dealt), max(dealt) - min(dealt), sum(lengths) / num_ranks]
    low, high = (metrics[f"global_seqlen/balanced_{name}"] for name in ("min", "max"))
    assert low <= found[3] <= high and high - low <= max(lengths)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    run_dir: Path, train: Train, tinywiki: Path, tmp_path: Path
) -> None:
    """From the state after step 2, in another folder: step 3 is the same to the last bit."""
    state = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run_dir / 'actor' / 'global_step_2'}")
    steps = ("trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.save_freq=2")
    tested = f"data.test_files={tinywiki / 'test.parquet'}"
    folder = train(tmp_path / "on", *state, *steps, tested, "trainer.logger=[]")
    resumed, straight = metrics_by_step(folder), metrics_by_step(run_dir)
    assert sorted(resumed) == [3]
    kept = {name for name in straight[3] if not name.startswith(("timing", "memory", "perf")) and name != "time"}
    assert len(kept) > 60 and {name: resumed[3][name] for name in kept} == {name: straight[3][name] for name in kept}
    paths = [path / "trajectories" / "train_step_3.parquet" for path in (folder, run_dir)]
    columns = ["group_id", "ids", "loss_mask", "log_probs", "reward", "weight_version"]
    assert read_trajectories(paths[0], columns) == read_trajectories(paths[1], columns)
    assert_same_weights(folder, run_dir, 3, {"actor", "ref"})


GUARDED = (
    "reward.function=tests.helpers.collapsing_reward.CollapsingReward",
    "reward.kwargs={collapsed: [2]}",
    "trainer.collapse_guard.action=rollback",
    "trainer.collapse_guard.patience=1",
    "trainer.collapse_guard.min_reward=0.25",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "+trainer.val_before_train=false",
)


@pytest.fixture(scope="module")
def guarded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps. The weights after two of them have collapsed, which the third step's reward shows."""
    return train(tmp_path_factory.mktemp("guarded"), *GUARDED)


def test_an_alarm_takes_the_run_back_to_a_good_checkpoint(guarded: Path) -> None:
    found = metrics_by_step(guarded)
    assert [found[step]["health/guard/alarm"] for step in (1, 2, 3, 4)] == [0, 0, 1, 0]
    # The rate is constant until the alarm halves it.
    assert found[4]["actor/lr"] == pytest.approx(0.5 * found[3]["actor/lr"])
    # The weights of step 2 sampled the bad step, so step 1 is the last good one, and step 4 goes on from there.
    step_1, step_2, step_3, step_4 = (weights(guarded, step) for step in (1, 2, 3, 4))
    assert torch.equal(step_3, step_1) and not torch.equal(step_2, step_1), "step 3 is saved as it goes on"
    assert (step_4 - step_1).norm() > 0


@pytest.mark.slow
def test_after_a_rollback_a_killed_run_goes_on_from_where_it_went_back_to(
    guarded: Path, train: Train, tmp_path: Path
) -> None:
    """From the state of the step that went back, in another folder: the next step is the same to the last bit."""
    state = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={guarded / 'actor' / 'global_step_3'}")
    folder = train(tmp_path / "on", *GUARDED, *state, "trainer.logger=[]")
    resumed, straight = metrics_by_step(folder), metrics_by_step(guarded)
    names = ("actor/lr", "actor/grad_norm", "critic/score/mean", "response_length/mean")
    assert [resumed[4][name] for name in names] == [straight[4][name] for name in names]
    assert torch.equal(weights(folder, 4), weights(guarded, 4))


def test_the_guard_watches_by_default(run_dir: Path) -> None:
    """It counts the steps in a row in which no group had two different rewards, whatever the small policy did."""
    expected = 0
    for step, metrics in sorted(metrics_by_step(run_dir).items()):
        if step:
            expected = expected + 1 if metrics["health/zero_variance_groups"] == 1 else 0
            assert metrics["health/guard/dead_run_steps"] == expected
            assert (metrics["health/zero_advantages"] == 1) is (expected > 0), "grpo, without a KL in the reward"
            assert metrics["health/equal_rewards"] <= metrics["health/zero_variance_groups"]
            assert metrics["health/guard/alarm"] == 0.0


def weights(folder: Path, step: int) -> torch.Tensor:
    state = AutoModelForCausalLM.from_pretrained(folder / "actor" / f"global_step_{step}").state_dict()
    return state["model.layers.0.mlp.up_proj.weight"]


def test_the_same_command_again_is_refused(run_dir: Path, tinywiki: Path, policy: Path) -> None:
    """At once, without a retriever and before anything of the run is changed."""
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    command = [sys.executable, *small_run(tinywiki, policy, "http://127.0.0.1:1", run_dir)]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{run_dir} holds a run already (its last checkpoint is actor/global_step_3)" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_an_archive_takes_all_that_a_run_writes(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder, symlinks=True)
    (folder / "mine.md").touch()
    names = sorted(path.name for path in run_dir.iterdir() if path.name != LOCK)
    kept = archive(folder)
    assert kept is not None and sorted(path.name for path in kept.iterdir()) == names
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, "archive", "mine.md"]


def test_no_process_is_left_behind(run_dir: Path) -> None:
    ours = [p.cmdline() for p in psutil.process_iter() if str(run_dir) in " ".join(_cmdline(p))]
    assert ours == []


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
