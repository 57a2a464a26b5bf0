"""What the dashboard is told: curves, seeds, alarms, timelines."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dashboard_world import score, settings, trained_run
from viewer_world import Episodes, client_of

from search_r1.viewer import pages
from search_r1.viewer.app import PlainResponse
from search_r1.viewer.dashboard import PANELS, metrics_of
from search_r1.viewer.runs import Run, find_runs
from verl.tracking.run_data import RunData
from verl.tracking.spans import Span, write_timeline


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, episodes: Episodes) -> Path:
    """Two seeds of one configuration, and a run with another learning rate."""
    folder = tmp_path_factory.mktemp("dashboards")
    for seed in (0, 1):
        trained_run(folder / f"seed{seed}", episodes, seed)
    trained_run(folder / "fast", episodes, 0, config=settings(0, actor_rollout_ref={"actor": {"optim": {"lr": 1e-3}}}))
    return folder


def asked(folder: Path, *names: str, **more: Any) -> dict[str, Any]:
    reply = client_of(folder).get("/api/dashboard", params={"run": list(names), **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def series(found: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return next(panel for panel in found["panels"] if panel["key"] == key)["series"]


def written(folder: Path, *lines: str | dict[str, Any]) -> Path:
    """A run of these lines."""
    folder.mkdir()
    (folder / "config.yaml").write_text("trainer: {seed: 0}\n")
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(texts))
    return folder


def test_a_curve_is_what_was_logged(runs: Path) -> None:
    found = asked(runs, "seed0")
    [reward] = series(found, "reward")
    assert reward["steps"] == list(range(1, 13)) and reward["low"] is None
    assert reward["mean"] == [score(step, 0) for step in range(1, 10)] + [0.05] * 3
    [by_set] = [one for one in series(found, "val_exact_match") if one["metric"] == "val/reward/rivers/exact_match"]
    assert by_set["label"] == "val rivers" and by_set["kind"] == "val" and by_set["steps"] == [4, 8, 12]
    assert {one["label"] for one in series(found, "phases")} == {
        "gen",
        "update_actor",
        "weight_sync",
    }  # without the whole
    assert found["runs"][0]["last_step"] == 12 and found["runs"][0]["timelines"] == list(range(1, 13))


def test_seeds_of_a_configuration_are_one_curve_with_its_range(runs: Path) -> None:
    found = asked(runs, "seed0", "seed1", "fast")
    assert [group["runs"] for group in found["groups"]] == [["seed0", "seed1"], ["fast"]]
    both, alone = series(found, "reward")
    values = [score(2, 0), score(2, 1)]
    assert both["mean"][1] == pytest.approx(sum(values) / 2)
    assert (both["low"][1], both["high"][1], both["num_runs"][1]) == (min(values), max(values), 2)
    assert alone["group"] == "fast" and alone["low"] is None
    apart = asked(runs, "seed0", "seed1", "fast", by_seed=False)
    assert [one["group"] for one in series(apart, "reward")] == ["seed0", "seed1", "fast"]


def test_a_seed_that_has_got_further_is_not_cut(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "runs")
    metrics = tmp_path / "runs/seed1/metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:5]))
    [both] = series(asked(tmp_path / "runs", "seed0", "seed1"), "reward")
    assert both["num_runs"] == [2] * 5 + [1] * 7
    assert both["low"][5] == both["mean"][5] == both["high"][5] == score(6, 0)


def test_alarms_are_those_of_the_guard(runs: Path) -> None:
    """min_reward is broken from step 10 on, and an alarm after two steps in a row."""
    assert asked(runs, "seed0")["alarms"] == [{"run": "seed0", "step": 11, "conditions": {"min_reward": 2}}]


def test_spans_of_a_timeline_lie_in_each_other(runs: Path) -> None:
    found = client_of(runs).get("/api/timeline", params={"run": "seed0", "step": 2}).json()
    assert found["seconds"] == 4.0 and [row["name"] for row in found["rows"]] == ["driver", "engine 0", "actor 0"]
    driver, engine, _ = (
        [(s["name"], s["start"], s["seconds"], s["depth"]) for s in row["spans"]] for row in found["rows"]
    )
    assert driver == [("step", 0.0, 4.0, 0), ("gen", 0.0, 2.0, 1), ("update_actor", 2.0, 1.5, 1)]
    assert engine == [("rollouts", 0.5, 1.5, 0), ("generate", 0.5, 0.5, 1), ("generate", 1.25, 0.75, 1)]


def test_a_step_changes_the_version(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "seed0", tmp_path / "live")
    client = client_of(tmp_path / "live")
    version = lambda: client.get("/api/dashboard/version", params={"run": "live"}).json()["version"]  # noqa: E731
    before = version()
    assert version() == before
    with (tmp_path / "live/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 13, "critic/score/mean": 0.75}) + "\n")
    assert version() != before
    assert series(asked(tmp_path / "live", "live"), "reward")[0]["mean"][-1] == 0.75


def test_spans_that_follow_each_other_are_beside_each_other(tmp_path: Path) -> None:
    """The first seems to end 0.1 us after the second begins: 0.06 + 100.06 us are written as 0.1 + 100.1."""
    run = written(tmp_path / "run", {"step": 1})
    follow = [Span("score", 6e-8, 1.0012e-4), Span("update", 1.0012e-4, 2e-4)]
    write_timeline(run, 1, {"driver": [Span("step", 0.0, 2e-4)], "actor 0": follow})
    rows = client_of(run).get("/api/timeline", params={"run": "run", "step": 1}).json()["rows"]
    assert [(span["name"], span["depth"]) for span in rows[1]["spans"]] == [("score", 0), ("update", 0)]


def test_of_a_growing_run_only_the_newest_metrics_are_kept(tmp_path: Path) -> None:
    run = written(tmp_path / "run", {"step": 1, "critic/score/mean": 0.5})
    for step in range(2, 6):
        with (run / "metrics.jsonl").open("a") as file:
            file.write("\n" + json.dumps({"step": step, "critic/score/mean": 0.5}))
        assert asked(run, "run")["runs"][0]["last_step"] == step
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is RunData and one.run_dir == run]
    assert [max(one.metrics) for one in kept] == [5]


def test_runs_are_looked_for_once(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[Sequence[Path]] = []

    def counted(paths: Sequence[Path]) -> list[Run]:
        scans.append(paths)
        return find_runs(paths)

    monkeypatch.setattr(pages, "find_runs", counted)
    asked(runs, "seed0", "seed1", "fast")
    client_of(runs).get("/api/dashboard/version", params={"run": ["seed0", "seed1", "fast"]})
    assert len(scans) == 2


def test_names_of_metrics_are_looked_for_once(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look goes through all rows."""

    class Rows(dict[int, dict[str, float]]):
        looks = 0

        def values(self) -> Any:
            Rows.looks += 1
            return super().values()

    alike = RunData.__init__
    monkeypatch.setattr(RunData, "__init__", lambda self, *args: alike(self, args[0], Rows(args[1]), args[2]))
    shutil.copytree(runs / "seed0", tmp_path / "seed0")
    assert len(asked(tmp_path, "seed0")["panels"]) > 5 and Rows.looks == 1


def test_a_long_curve_is_thinned_and_its_alarms_are_not(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": step, "critic/score/mean": step / 10, "timing_s/gen": 1.0} for step in range(1, 9004)
    ]
    for line in lines[::2]:
        line["timing_s/update_actor"] = 2.0
    for line in lines[99::100]:
        line["val/test_score/mean"] = 0.5
    lines[41] |= {"health/guard/alarm": 1, "health/guard/min_reward": 3}
    found = asked(written(tmp_path / "run", *lines), "run")
    [reward] = series(found, "reward")
    assert reward["steps"][:3] == [1, 5, 10] and reward["steps"][-2:] == [9000, 9003]
    assert len(reward["steps"]) <= 2002 and reward["mean"] == [step / 10 for step in reward["steps"]]
    assert series(found, "val_reward")[0]["steps"] == list(range(100, 9004, 100))
    gen, update = series(found, "phases")
    assert gen["steps"] == reward["steps"] and update["steps"] == [step for step in gen["steps"] if step % 2]
    assert found["alarms"] == [{"run": "run", "step": 42, "conditions": {"min_reward": 3}}]


def test_answers_are_written_beside_the_event_loop(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop: list[bool] = []
    render = PlainResponse.render

    def watched(self: PlainResponse, content: Any) -> bytes:
        in_loop.append(asyncio._get_running_loop() is not None)
        return render(self, content)

    monkeypatch.setattr(PlainResponse, "render", watched)
    asked(runs, "seed0")
    assert in_loop == [False]


@pytest.mark.parametrize(
    ("path", "params", "said"),
    [
        ("dashboard", {"run": "gone"}, "there is no run 'gone'"),
        ("timeline", {"run": "seed0", "step": 99}, "step_99.json is missing"),
    ],
)
def test_what_is_not_there(runs: Path, path: str, params: dict[str, Any], said: str) -> None:
    reply = client_of(runs).get(f"/api/{path}", params=params)
    assert reply.status_code == 404 and said in reply.json()["detail"]


NO_STEP = ('{"time": 1.0}', "[1, 2]", '{"step": null}', '{"step": 2, "reward": "high"}', '{"step": 2, "reward": [1]}')


@pytest.mark.parametrize(
    ("line", "said"), [("no JSON", "not JSON"), *((line, "not the metrics of a step") for line in NO_STEP)]
)
def test_a_line_that_is_not_of_a_step_is_named(tmp_path: Path, line: str, said: str) -> None:
    run = written(tmp_path / "run", {"step": 1}, line, {"step": 3})
    reply = client_of(run).get("/api/dashboard?run=run")
    assert reply.status_code == 404 and f"metrics.jsonl, line 2: {said}" in reply.json()["detail"]


def test_other_damage_is_named(tmp_path: Path) -> None:
    run = written(tmp_path / "run", {"step": 1}, "line", {"step": 3})
    client = client_of(run)
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().replace(b"line", b'{"step": 2, "\xff": 1}'))
    assert "metrics.jsonl, line 2: not JSON" in client.get("/api/dashboard?run=run").json()["detail"]
    metrics.write_text('{"step": 1}\n')
    (run / "config.yaml").write_text("trainer:\n  seed: {0\n")
    said = client.get("/api/dashboard?run=run").json()["detail"]
    assert "config.yaml is not YAML" in said and "line 3" in said
    (run / "timeline").mkdir()
    for text in ('{"traceEvents": [', '{"traceEvents": [{"ph": "X"}]}'):
        (run / "timeline/step_1.json").write_text(text)
        assert "step_1.json is not the timeline" in client.get("/api/timeline?run=run&step=1").json()["detail"]


def test_a_guard_value_that_is_no_number_is_no_alarm(tmp_path: Path) -> None:
    whole = {"step": 1, "health/guard/alarm": 1, "health/guard/min_reward": 2, "health/guard/max_kl": None}
    lost = {"step": 2, "health/guard/alarm": None, "health/guard/min_reward": 3}
    found = asked(written(tmp_path / "run", whole, lost), "run")
    assert found["alarms"] == [{"run": "run", "step": 1, "conditions": {"min_reward": 2}}]


@pytest.mark.parametrize("line", ["", '{"step": 1, "ti'])
def test_a_run_without_a_step_has_no_panels(tmp_path: Path, line: str) -> None:
    found = asked(written(tmp_path / "new", line), "new")
    assert found["panels"] == [] and found["runs"][0]["last_step"] is None


def test_no_metric_is_in_two_panels(runs: Path) -> None:
    names = {name for line in (runs / "seed0/metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    drawn = [name for panel in PANELS for name in metrics_of(panel, sorted(names))]
    assert len(drawn) == len(set(drawn)) > 20
