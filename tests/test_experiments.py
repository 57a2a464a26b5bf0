"""scripts/experiments: the settings that are compared, what counts as finished, the driver, table and figure."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import yaml

from verl.config import check_supported, to_yaml
from verl.config.rules.predicates import has_kl_in_reward, trajectories_per_step
from verl.errors import DataError
from verl.tracking.run_data import RunData

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "experiments"
sys.path.insert(0, str(FOLDER))  # as Python does when it runs a file there

import collect  # noqa: E402
import grid  # noqa: E402
from experiment import Experiment, Run, Variant, read_experiment  # noqa: E402
from processes import Job, retrieval_server, run_all  # noqa: E402

FILES = sorted(FOLDER.glob("*.yaml"))
RUNS = [
    pytest.param(run, id=f"{path.stem}-{run.variant.name}")
    for path in FILES
    for run in read_experiment(path, seeds=[3]).runs(Path("runs"))
]
OF_THE_RUN = {"trainer.experiment_name", "trainer.default_local_dir"}


def leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


@cache
def settings(file: str) -> dict[str, dict[str, object]]:
    """All settings of each variant, without the names that tell the runs apart."""
    runs = read_experiment(FOLDER / file, seeds=[3]).runs(Path("runs"))
    trees = {run.variant.name: dict(leaves(yaml.safe_load(to_yaml(run.config)))) for run in runs}
    return {name: {k: v for k, v in tree.items() if k not in OF_THE_RUN} for name, tree in trees.items()}


def difference(one: dict[str, object], other: dict[str, object]) -> set[str]:
    return {key for key in one if one[key] != other[key]}


@pytest.mark.parametrize("run", RUNS)
def test_settings_of_every_run_can_be_trained_with_as_many_samples(run: Run) -> None:
    config = run.config
    check_supported(config)
    assert trajectories_per_step(config) == 384
    assert config.data.test_files is not None


def test_the_six_algorithms_share_all_that_is_not_theirs() -> None:
    algorithms = settings("algorithms.yaml")
    shared = {
        "trainer.total_training_steps": 40,
        "actor_rollout_ref.actor.optim.lr": 5e-4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 384,
        "actor_rollout_ref.actor.entropy_coeff": 0.0,
        "algorithm.gamma": 1.0,
    }
    assert len(algorithms) == 6
    for name, value in shared.items():
        assert {key: tree[name] for key, tree in algorithms.items()} == dict.fromkeys(algorithms, value)
    published, corrected = algorithms["ema_pg_published"], algorithms["ema_pg_corrected"]
    assert difference(published, corrected) == {"actor_rollout_ref.actor.kl_topk_gradient"}
    for other in ("rloo", "reinforce_plus_plus"):
        assert difference(algorithms["grpo"], algorithms[other]) == {"algorithm.adv_estimator"}


def test_ppo_has_its_kl_in_the_reward_and_a_critic_that_starts_as_the_policy() -> None:
    [ppo] = [run.values[0] for run in RUNS if run.id == "algorithms-ppo"]
    config = ppo.config
    assert has_kl_in_reward(config) and not config.actor_rollout_ref.actor.use_kl_loss
    assert config.critic.model.path == config.actor_rollout_ref.model.path


def test_the_anchors_of_the_grid_differ_in_one_thing_at_a_time() -> None:
    variants = settings("anchor_grid.yaml")
    anchors = [tree for name, tree in variants.items() if name != "ema_pg" and not name.startswith("grpo")]
    changed = [difference(variants["ema_pg"], tree) for tree in anchors]
    assert sorted(key.rpartition(".")[2] for [key] in changed) == [
        *["kl_loss_coef"] * 3,
        *["ref_policy_ema_tau"] * 2,
        "ref_policy_ema_update_period",
    ]


def test_the_curriculum_is_compared_with_itself_switched_off() -> None:
    variants = settings("curriculum.yaml")
    assert difference(variants["off"], variants["on"]) == {"data.curriculum.enable"}


@pytest.mark.parametrize("file", ["collapse.yaml", "anchor_grid.yaml"])
def test_what_may_collapse_differs_from_ema_pg_in_the_kl_only(file: str) -> None:
    variants = settings(file)
    changed = [difference(variants["ema_pg"], tree) for tree in variants.values()]
    assert all("kl" in key or "ref_policy_ema" in key for keys in changed for key in keys)


GOOD = {"title": "T", "config_name": "tinywiki", "seeds": [3], "data_options": [], "common": [], "runs": []}


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "the names are none"),
        ([{"name": "a", "label": "A", "overrides": []}] * 2, "a name of its own; the names are a, a"),
        ([{"name": "a/b", "label": "A", "overrides": []}], r"runs\[0\]: name 'a/b' becomes a folder"),
        ([{"name": "a", "overrides": []}], r"runs\[0\]: needs exactly the keys label, name, overrides"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused(runs: list, message: str, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump(GOOD | {"runs": runs}))
    with pytest.raises(ValueError, match=message):
        read_experiment(path)


def test_data_made_with_options_is_apart_from_other_data(tmp_path: Path) -> None:
    tree = GOOD | {
        "data_options": ["--stop=0.8", "--train_hops=1,2"],
        "runs": [{"name": "a", "label": "A", "overrides": []}],
    }
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(tree))
    [run] = read_experiment(tmp_path / "e.yaml").runs(Path("out"), Path("worlds"))
    assert run.world.folder == Path("worlds/stop_0.8_train_hops_1_2/seed3")
    assert grid.make_data(run.world).command[-2:] == ["--stop=0.8", "--train_hops=1,2"]


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Two variants with two seeds and two steps, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    runs = [
        {"name": "slow", "label": "Slow", "overrides": ["actor_rollout_ref.actor.optim.lr=1.0e-4"]},
        {"name": "fast", "label": "Fast", "overrides": []},
    ]
    common = ["trainer.total_training_steps=2", "trainer.logger=[console]"]
    tree = GOOD | {"title": "Slow and fast", "seeds": [3, 4], "common": common, "runs": runs}
    Path("pair.yaml").write_text(yaml.safe_dump(tree))
    return read_experiment(Path("pair.yaml"))


def leave(run: Run, metrics: dict[int, dict[str, float]]) -> None:
    """What a training leaves in its folder."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.yaml").write_text(to_yaml(run.config))
    lines = [json.dumps({"step": step} | row) for step, row in metrics.items()]
    (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def scores(overall: float, one_hop: float, two_hop: float) -> dict[str, float]:
    return {
        "test/test_score/mean": overall,
        "test/test_score/tinywiki_1hop": one_hop,
        "test/test_score/tinywiki_2hop": two_hop,
    }


START = scores(0.5, 1.0, 0.0)


def test_a_run_is_finished_with_its_last_step_and_its_test_result(experiment: Experiment) -> None:
    run = experiment.runs(Path("out"))[0]
    with pytest.raises(DataError, match="holds no run yet"):
        run.finished()
    leave(run, {0: START, 1: {}})
    with pytest.raises(DataError, match="ended at step 1 of 2"):
        run.finished()
    leave(run, {0: START, 1: {}, 2: {"val/test_score/mean": 0.9}})
    with pytest.raises(DataError, match="no test result"):
        run.finished()
    leave(run, {0: START, 1: {}, 2: scores(0.9, 0.8, 1.0)})
    assert run.finished().metrics[2]["test/test_score/mean"] == 0.9
    assert run.why_unfinished() is None


def test_a_run_with_other_settings_does_not_count(experiment: Experiment) -> None:
    """Another address of the retriever, or a key that the settings of that time did not have, is no other setting."""
    slow, fast = experiment.runs(Path("out"))[:2]
    leave(fast, {2: scores(0.9, 0.8, 1.0)})
    saved = yaml.safe_load((fast.folder / "config.yaml").read_text())
    saved["retriever"]["url"] = "http://127.0.0.1:9/retrieve"
    del saved["algorithm"]["filter_overlong"]
    (fast.folder / "config.yaml").write_text(yaml.safe_dump(saved))
    assert fast.why_unfinished() is None
    slow_now = Run(slow.variant, slow.world, fast.folder, slow.config_name, slow.common)
    assert "other values of actor_rollout_ref.actor.optim.lr" in (slow_now.why_unfinished() or "")


STAND_IN = """
# Leaves what the real program leaves; training the slow variant with seed 3 fails.
import os, sys
from pathlib import Path
program, given = sys.argv[2], dict(word.split("=", 1) for word in sys.argv[3:] if "=" in word)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(f"{program} {given.get('trainer.default_local_dir', sys.argv[4])}\\n")
if program == "search_r1.data.tinywiki":
    Path(sys.argv[4]).mkdir(parents=True)
    Path(sys.argv[4], "corpus.jsonl").write_text('{"id": "a", "contents": "Osk is a town."}')
elif program == "verl.trainer.sft":
    Path(given["trainer.default_local_dir"], "global_step_500").mkdir(parents=True)
else:
    folder = Path(given["trainer.default_local_dir"])
    if str(folder).endswith("slow/seed3") and os.environ.get("BROKEN"):
        sys.exit(1)
    assert given["retriever.url"] == "http://127.0.0.1:8000/retrieve"
    row = '"test/test_score/mean": 0.5, "test/test_score/tinywiki_1hop": 1, "test/test_score/tinywiki_2hop": 0'
    steps = [f'{{"step": {step}, "timing_s/step": 1, "val/test_score/mean": 0.5, {row}}}' for step in (0, 2)]
    (folder / "metrics.jsonl").write_text("\\n".join(steps))
"""


def test_the_driver_goes_on_where_it_was(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "{tmp_path}/stand_in.py" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(grid, "PYTHON", str(python))
    monkeypatch.setattr(grid, "retrieval_server", lambda corpus, log: nullcontext("http://127.0.0.1:8000/retrieve"))
    monkeypatch.setattr(collect, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(sys, "argv", ["grid.py", "pair.yaml", "--jobs", "1"])
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("BROKEN", "1")

    assert grid.main() == 1
    assert calls.read_text().splitlines() == [
        "search_r1.data.tinywiki runs/experiments/seed3/data",
        "search_r1.data.tinywiki runs/experiments/seed4/data",
        "verl.trainer.sft runs/experiments/seed3/sft",
        "verl.trainer.sft runs/experiments/seed4/sft",
        "verl.trainer.main_ppo runs/pair/slow/seed3",
        "verl.trainer.main_ppo runs/pair/fast/seed3",
        "verl.trainer.main_ppo runs/pair/slow/seed4",
        "verl.trainer.main_ppo runs/pair/fast/seed4",
    ]
    printed = capsys.readouterr().out
    assert "slow, seed 3: FAILED" in printed and "fast, seed 4: done in" in printed
    assert "Unfinished runs are left out: Slow (seed 3)." in Path("runs/pair/pair.md").read_text()
    assert not list((tmp_path / "results").iterdir())

    calls.unlink()
    monkeypatch.delenv("BROKEN")
    monkeypatch.setattr(sys, "argv", ["grid.py", "pair.yaml", "--publish"])
    assert grid.main() == 0
    assert calls.read_text().splitlines() == ["verl.trainer.main_ppo runs/pair/slow/seed3"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["pair.md", "pair.png"]


def test_a_dry_run_starts_nothing(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(experiment.runs(Path("runs/pair"))[0], {0: START, 2: START})
    monkeypatch.setattr(sys, "argv", ["grid.py", "pair.yaml", "--dry_run", "--seeds", "3"])
    assert grid.main() == 0
    assert capsys.readouterr().out == "slow, seed 3: finished\nfast, seed 3: runs/pair/fast/seed3 holds no run yet\n"


def test_no_more_jobs_run_at_a_time_than_allowed(tmp_path: Path) -> None:
    """Each of three waits for another (at most a minute, if there is none) before it ends."""
    diary = tmp_path / "diary"
    meet = f"for _ in {{1..600}}; do (( $(grep -c begin {diary}) > 1 )) && break; sleep 0.1; done"
    script = f"echo begin >>{diary}; {meet}; sleep 0.3; echo end >>{diary}"
    jobs = [Job(name, ["bash", "-c", script], tmp_path / f"{name}.log") for name in "abc"]
    assert run_all(jobs, at_once=2) == []
    running = list(accumulate(1 if line == "begin" else -1 for line in diary.read_text().splitlines()))
    assert max(running) == 2 and running[-1] == 0


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A test run in the background of a shell is told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_what_runs_and_starts_no_more(
    tmp_path: Path, heeds_ctrl_c: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        """Where `run_all` waits for its jobs; Ctrl-C comes once the first one runs."""
        while not (tmp_path / "a").exists() or not (tmp_path / "a").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("processes.time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    script = f"echo $$ >{tmp_path}/$0; exec sleep 600"
    jobs = [Job(name, ["bash", "-c", script, name], tmp_path / f"{name}.log") for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        run_all(jobs, at_once=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "a").read_text()), 0)
    assert not (tmp_path / "b").exists()


def test_the_server_answers_and_goes(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "town", "contents": "Osk is a town."}\n')
    with retrieval_server(corpus, tmp_path / "log") as url:
        body = json.dumps({"queries": ["Osk town"]}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["result"][0][0]["id"] == "town"
    with pytest.raises(OSError):
        urllib.request.urlopen(request, timeout=10)


def test_a_server_that_does_not_start_says_where_to_look(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=f"see {tmp_path}/log"),
        retrieval_server(tmp_path / "gone.jsonl", tmp_path / "log"),
    ):
        pass
    assert "gone.jsonl does not exist" in (tmp_path / "log").read_text()


def test_table_by_hand(experiment: Experiment, tmp_path: Path) -> None:
    """Slow: mean of 0.9 and 0.8 is 0.85. Steps of 2, 4, 6, 9 s: median 5. Runs of 36 + 24 and 150 + 30 s: 2 minutes."""
    slow, fast, slow_4, _ = experiment.runs(Path("out"))
    times = [
        {1: {"timing_s/step": 2.0, "timing_s/gen": 1.5}, 2: {"timing_s/step": 4.0, "timing_s/testing": 54.0}},
        {1: {"timing_s/step": 6.0}, 2: {"timing_s/step": 9.0, "timing_s/save_checkpoint": 165.0}},
    ]
    after = [scores(0.9, 1.0, 0.8), scores(0.8, 0.9, 0.7)]
    for run, time_of, last in zip((slow, slow_4), times, after, strict=True):
        leave(run, {0: START, 1: time_of[1], 2: time_of[2] | last})
    leave(fast, {0: START, 1: {"timing_s/step": 3.0}, 2: {"timing_s/step": 3.0} | scores(1.0, 1.0, 1.0)})
    table = collect.write_results(experiment, experiment.runs(Path("out")), tmp_path)
    rows = [line for line in table.read_text().splitlines() if line.startswith("|")]
    assert rows == [
        "|  | overall | 1-hop | 2-hop | runs | s/step | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| before RL | 0.500 (0.500 to 0.500) | 1.000 (1.000 to 1.000) | 0.000 (0.000 to 0.000) |  |  |  |",
        "| Slow | 0.850 (0.800 to 0.900) | 0.950 (0.900 to 1.000) | 0.750 (0.700 to 0.800) | 2 | 5.0 | 2.0 |",
        "| Fast | 1.000 (1.000 to 1.000) | 1.000 (1.000 to 1.000) | 1.000 (1.000 to 1.000) | 1 | 3.0 | 0.1 |",
    ]
    assert "Unfinished runs are left out: Fast (seed 4)." in table.read_text()
    assert (tmp_path / "pair.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_a_finished_run_there_is_no_table(experiment: Experiment, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run of pair is finished: out/slow/seed3 holds no run yet"):
        collect.write_results(experiment, experiment.runs(Path("out")), tmp_path)


def validated(*values: float) -> RunData:
    return RunData(Path(), {10 * i: {"val/test_score/mean": value} for i, value in enumerate(values)}, {})


def test_band_over_seeds_by_hand() -> None:
    runs = [validated(0.5, 0.6, 1.0), validated(0.4, 0.9)]
    assert collect.over_seeds(runs, min) == {0: 0.4, 10: 0.6}
    assert collect.over_seeds(runs, max) == {0: 0.5, 10: 0.9}
    assert collect.over_seeds(runs, fmean) == pytest.approx({0: 0.45, 10: 0.75})


def test_the_figure_shows_every_variant(tmp_path: Path) -> None:
    """More curves change the picture, also where there are more variants than colours."""
    results = {Variant(str(i), f"variant {i}", ()): {3: validated(i / 10, 0.9)} for i in range(8)}
    sizes = []
    for number in (1, 6, 7, 8):  # there are six colours
        path = tmp_path / f"{number}.png"
        collect.draw_figure("Many", dict(list(results.items())[:number]), path)
        sizes.append(path.read_bytes())
    assert len(set(sizes)) == 4
