"""Each back end through the Tracker, read back from what it wrote."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from e2e_world import ROOT
from rich.console import Console

from verl.errors import ConfigError
from verl.protocol import Prompt, Status, Trajectory
from verl.tracking.backend import RunInfo, Sample
from verl.tracking.console_backend import ConsoleBackend, compact_line
from verl.tracking.spans import Timer
from verl.tracking.tracker import BACKENDS, Tracker
from verl.trainer.metrics.batch import validation_metrics


def run_tracker(
    loggers: list[str], run_dir: Path, config: dict[str, Any] | None = None, begin: int = 1, resumed: bool = False
) -> None:
    """Two steps from `begin` on."""
    with Tracker(loggers, "project", "experiment", run_dir, config or {}, resumed=resumed) as tracker:
        tracker.log({"critic/score/mean": 0.25}, step=begin)
        tracker.log({"critic/score/mean": torch.tensor(0.5)}, step=begin + 1)


def mlflow_runs(folder: Path) -> Any:
    """The runs of the project, the newest first."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("project")
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])


def plain(file: io.StringIO) -> str:
    """What was printed, without the control sequences of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


def test_jsonl_is_always_on_and_flushed(tmp_path: Path) -> None:
    tracker = Tracker([], "project", "experiment", tmp_path / "new" / "run", {})
    tracker.log({"critic/score/mean": 0.25, "actor/pg_loss": float("nan")}, step=7)
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()  # before finish
    tracker.finish()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert record.pop("time") > 1.7e9
    assert record == {"step": 7, "critic/score/mean": 0.25, "actor/pg_loss": None}


def test_a_resumed_run_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    """The one before was killed in the middle of a line."""
    run_tracker([], tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ti')
    run_tracker(["jsonl"], tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 1, 2]


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_tracker(["tensorboard"], tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]


def test_wandb_without_an_account_writes_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-such-netrc"))
    with caplog.at_level(logging.WARNING, logger="verl"):
        run_tracker(["wandb"], tmp_path, {"trainer": {"seed": 3}, "api_key": "very-secret"})
    said = [record for record in caplog.records if record.name == "verl.tracking.wandb_backend"]
    assert len(said) == 1 and "offline" in said[0].getMessage()
    (run_file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = run_file.read_bytes()
    assert b"critic/score/mean" in content
    assert b"very-secret" not in content


def test_an_explicit_wandb_mode_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_tracker(["wandb"], tmp_path)
    assert not list(tmp_path.glob("wandb/*run-*"))


SAMPLES = [
    Sample("nq", "Which river?", '{"target": ["Loire"]}', "<think>a</think>\n<answer>Loire</answer>", "answered",
           2, 1.0, {"exact_match": 1.0}),
    Sample("nq", "Which <b>sea</b>?", "null", "hm \ud800", "failed", 0, None, {}),
]  # fmt: skip


def test_mlflow_has_the_same_names_and_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = {"trainer": {"seed": 3, "many": {f"key{i}": "x" * 7000 for i in range(120)}}, "api_key": "very-secret"}
    run_tracker(["mlflow"], tmp_path, config)
    run_tracker(["mlflow"], tmp_path)  # the experiment is there already
    newest, run = mlflow_runs(tmp_path)
    assert run.info.run_name == "experiment" and run.info.status == newest.info.status == "FINISHED"
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.params["trainer.seed"] == "3" and len(run.data.params) == 122
    assert "very-secret" not in str(run.data.params)


def test_mlflow_continues_the_run_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_tracker(["mlflow"], tmp_path, {"resume_mode": "disable", "seed": 1})
    settings = {"resume_mode": "auto", "seed": 1, "new": 2}
    run_tracker(["mlflow"], tmp_path, settings, begin=3, resumed=True)
    [run] = mlflow_runs(tmp_path)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [one.step for one in history] == [1, 2, 3, 4] and run.info.status == "FINISHED"
    assert run.data.params == {"resume_mode": "disable", "seed": "1", "new": "2"}
    assert run.data.tags["resumed.resume_mode"] == "auto" and "resumed.seed" not in run.data.tags
    assert not caplog.records

    client.delete_run(run.info.run_id)
    run_tracker(["mlflow"], tmp_path, settings, begin=5, resumed=True)
    [another] = mlflow_runs(tmp_path)
    assert another.info.run_id != run.info.run_id
    assert f"MLflow: run {run.info.run_id} cannot be continued (it was deleted), so a new one" in caplog.text
    run_tracker(["mlflow"], tmp_path, settings)
    assert len(mlflow_runs(tmp_path)) == 2, "one that was not resumed is new"


def test_wandb_continues_the_run_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: `wandb sync` joins folders of the same run."""
    monkeypatch.setenv("WANDB_MODE", "offline")

    def names() -> list[str]:
        folders = sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
        return [path.name.rpartition("-")[2] for path in folders]

    run_tracker(["wandb"], tmp_path)
    time.sleep(1.1)  # a folder is named after the second
    run_tracker(["wandb"], tmp_path, begin=3, resumed=True)
    first, second = names()
    assert first == second
    run_tracker(["wandb"], tmp_path)
    assert len(set(names())) == 2, "one that was not resumed is new"


def test_wandb_continues_online_and_starts_anew_where_its_run_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a stand-in for `wandb.init`, since there is no server of W&B here."""
    import wandb

    asked: list[tuple[str | None, str | None]] = []

    class Run:
        id = "new"

        def log(self, *_: Any, **__: Any) -> None: ...
        def finish(self, **_: Any) -> None: ...

    def init(**given: Any) -> Run:
        asked.append((given["id"], given["resume"]))
        if given["id"] == "gone":
            raise wandb.errors.CommError("run gone of https://me:secret@wandb.test was created and deleted")
        return Run()

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "init", init)
    run_tracker(["wandb"], tmp_path)
    run_tracker(["wandb"], tmp_path, resumed=True)
    assert asked == [(None, None), ("new", "allow")]
    (tmp_path / "trackers.json").write_text('{"wandb": "gone"}')
    run_tracker(["wandb"], tmp_path, resumed=True)
    assert asked[2:] == [("gone", "allow"), (None, None)]
    why = "run gone of https://***@wandb.test was created and deleted"
    assert f"W&B: run gone cannot be continued ({why}), so a new one is started" in caplog.text
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "new"}


def test_a_process_of_wandb_that_ends_is_a_warning_and_a_run_that_cannot_start_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    before = psutil.Process().children(recursive=True)
    tracker = Tracker(["wandb"], "project", "experiment", tmp_path, {})
    tracker.log({"critic/score/mean": 0.25}, step=1)
    own = [one for one in psutil.Process().children(recursive=True) if one not in before]
    assert own, "W&B works in a process of its own"
    for process in own:
        process.kill()
    psutil.wait_procs(own)

    for step in (2, 3):  # the first may still get into the pipe
        tracker.log_samples(SAMPLES[:1], step)
        tracker.log({"critic/score/mean": 0.5}, step)
    tracker.finish()
    assert "W&B did not take step 3" in caplog.text and "W&B did not take the end of the run" in caplog.text
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"trainer.logger: wandb: .*Invalid project name.*leave wandb out"):
        Tracker(["wandb"], "pro/ject", "experiment", tmp_path / "other", {})


class Closing:
    """A back end that notes that it was closed, and fails then."""

    closed: list[bool] = []

    def __init__(self, run: Any) -> None: ...

    def finish(self, failed: bool) -> None:
        self.closed.append(failed)
        raise OSError("its server is gone")


def test_all_back_ends_are_closed_also_when_one_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        monkeypatch.setitem(BACKENDS, name, f"{__name__}.Closing")
    tracker = Tracker(["one", "other"], "project", "experiment", tmp_path, {})
    with pytest.raises(OSError, match="its server is gone"):
        tracker.finish(failed=True)
    tracker.finish()
    assert Closing.closed == [True, True]


def test_mlflow_goes_where_its_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "shared").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_tracker(["mlflow"], tmp_path / "run")
    assert list((tmp_path / "shared").glob("*/*/metrics/critic/score/mean"))
    assert not (tmp_path / "run" / "mlruns").exists()


def test_mlflow_takes_the_names_of_a_validation_and_odd_data_sources(tmp_path: Path) -> None:
    """Its file store has no place for `val/num_questions` beside `val/num_questions/nq`."""
    questions = [Trajectory("g", Prompt((1,), "a+b", {}), status=Status.ANSWERED, reward=0.5)]
    metrics = validation_metrics(questions, "val")
    assert {"val/num_questions", "val/num_questions/a+b"} <= metrics.keys()
    with Tracker(["mlflow"], "project", "experiment", tmp_path, {}) as tracker:
        tracker.log(metrics, step=0)
        tracker.log(metrics, step=10)
    [run] = mlflow_runs(tmp_path)
    assert run.data.metrics["val/num_questions/all"] == run.data.metrics["val/num_questions/a_b"] == 1
    assert len(run.data.metrics) == len(metrics)


def test_mlflow_takes_all_of_a_step_whatever_its_data_sources_are_called(tmp_path: Path) -> None:
    names = ["nq", "https://x.org/d", "../c", "./d", "", "/", "x" * 260 + "a", "x" * 260 + "b", "x" * 260 + "b/c"]
    with Tracker(["mlflow"], "project", "experiment", tmp_path, {}) as tracker:
        tracker.log({f"val/test_score/{name}": float(number) for number, name in enumerate(names)}, step=1)
    [run] = mlflow_runs(tmp_path)
    assert sorted(run.data.metrics.values()) == [*range(len(names))]
    assert run.data.metrics["val/test_score/https:/_/x.org/d"] == 1 and run.data.metrics["val/test_score/_/c"] == 2


def test_a_server_of_mlflow_that_goes_away_is_a_warning_and_one_that_is_not_there_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = Tracker(["mlflow"], "project", "experiment", tmp_path, {})
    shutil.rmtree(tmp_path / "mlruns")
    tracker.log({"critic/score/mean": 0.5}, step=1)
    tracker.finish()
    assert "MLflow did not take step 1" in caplog.text and "MLflow did not take the end of the run" in caplog.text
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["critic/score/mean"] == 0.5
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:very-secret@127.0.0.1:9")
    with pytest.raises(ConfigError, match="trainer.logger: mlflow: .*127.0.0.1") as caught:
        Tracker(["mlflow"], "project", "experiment", tmp_path / "other", {})
    assert "very-secret" not in str(caught.value)


def test_mlflow_says_of_a_run_that_an_error_ended_that_it_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Tracker(["mlflow"], "project", "experiment", tmp_path, {}):
        raise ZeroDivisionError
    [run] = mlflow_runs(tmp_path)
    assert run.info.status == "FAILED"


def test_a_back_end_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "mlflow.entities", "verl.tracking.mlflow_backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    with pytest.raises(ConfigError, match=r"'mlflow' is not installed: .venv/bin/pip install -e '.\[mlflow\]'"):
        Tracker(["mlflow"], "project", "experiment", tmp_path / "run", {})


def test_trajectories_are_a_table_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Tracker(["wandb"], "project", "experiment", tmp_path, {}) as tracker:
        tracker.log_samples(SAMPLES[:1], step=1)
        tracker.log({"critic/score/mean": 0.25}, step=1)
        tracker.log_samples([], step=2)
    [table] = (tmp_path / "wandb").glob("offline-run-*/files/media/table/trajectories/train_*.table.json")
    stored = json.loads(table.read_text())
    assert dict(zip(stored["columns"], stored["data"][0], strict=True)) == {
        "step": 1, "data_source": "nq", "question": "Which river?", "gold": '{"target": ["Loire"]}',
        "response": "<think>a</think>\n<answer>Loire</answer>", "status": "answered", "searches": 2, "reward": 1.0,
        "exact_match": 1.0,
    }  # fmt: skip


def test_trajectories_are_texts_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(["tensorboard"], "project", "experiment", tmp_path, {}) as tracker:
        tracker.log_samples(SAMPLES, step=3)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    texts = [events.Tensors(f"trajectories/train/{place}")[0] for place in (0, 1)]
    assert [one.step for one in texts] == [3, 3]
    first, second = (one.tensor_proto.string_val[0].decode() for one in texts)
    assert first.startswith("**reward 1** exact_match 1; answered, 2 searches, nq\n\n    Which river?")
    assert first.endswith("    <think>a</think>\n    <answer>Loire</answer>")
    assert second.startswith("**reward none**") and second.endswith("    hm ?")


def test_a_logger_that_is_not_known_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'wandbb' is unknown.*tensorboard"):
        Tracker(["console", "wandbb"], "project", "experiment", tmp_path / "run", {})
    assert not (tmp_path / "run").exists()


def test_compact_line() -> None:
    metrics = {
        "critic/score/mean": 0.4123,
        "actor/kl_loss": 0.00312,
        "val/test_score/two": 0.25,
        "agent/call_status/ok": 1.5,
        "env/failed_ratio": 0.0,
        "val/failed_ratio": 0.125,
        "critic/advantages/max": 3.0,
    }
    line = compact_line(metrics, step=3, total_steps=80)
    assert line == "step 3/80 | reward 0.412 | kl 0.0031 | calls 1.50 | val two 0.250 | val/failed_ratio 0.125"


def test_the_line_says_where_a_steps_time_went() -> None:
    seconds = {"step": 10.0, "gen": 4.0, "update_actor": 5.0, "adv": 0.04, "testing": 30.0}
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()} | {"perf/driver_share": 0.03}
    assert compact_line(metrics, step=3) == "step 3 | s 10.0 | update_actor 50% gen 40%, driver alone 3%"


def log_to(console: Console, run_dir: Path) -> None:
    backend = ConsoleBackend(RunInfo("project", "experiment", run_dir, {}, total_steps=2), console)
    backend.log({"critic/score/mean": 0.5} | {f"val/test_score/a_long_source_{i}": 0.5 for i in range(9)}, step=1)
    backend.log({"critic/score/mean": 0.75}, step=2)
    backend.finish()


def test_a_log_file_holds_one_line_a_step_and_no_bar(tmp_path: Path) -> None:
    file = io.StringIO()
    log_to(Console(file=file, force_terminal=False), tmp_path)
    lines = file.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert "\x1b" not in file.getvalue()


def test_the_bar_has_phase_reward_exact_match_and_the_time_left(tmp_path: Path) -> None:
    """A step of 100 s of which 3 are left: also where steps are longer than rich's own estimate looks back."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=140)
    console_backend = ConsoleBackend(RunInfo("project", "experiment", tmp_path, {}, total_steps=4), console)
    timer = Timer(console_backend.now_in)
    console_backend.log({"val/test_score/mean": 0.125}, step=0)
    console_backend.log({"critic/score/mean": 0.5, "reward/exact_match": 0.25, "timing_s/step": 100.0}, step=1)
    deadline = time.monotonic() + 60
    with timer("step"), timer("update_actor"):
        while "update_actor" not in plain(file) and time.monotonic() < deadline:
            time.sleep(0.02)  # the bar is drawn several times a second
    console_backend.finish()
    assert re.search(r"1 of 4 steps, .* left, reward 0.500, em 0.250, val 0.125, update_actor", plain(file))
    assert re.search(r"step 1/4 \| reward 0.500 \| em 0.250 \| s 100.0 \| .*left", plain(file))


def test_a_narrow_terminal_has_room_for_steps_time_left_and_reward(tmp_path: Path) -> None:
    """Beside a long name, which is cut, and without the rate."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    backend = ConsoleBackend(
        RunInfo("project", "nq-search-r1-grpo-qwen2.5-7b-em", tmp_path, {}, total_steps=1005), console
    )
    backend.log({"critic/score/mean": 0.5, "reward/exact_match": 0.25, "timing_s/step": 71.0}, step=1)
    backend.finish()
    [*_, bar] = re.split(r"[\r\n]+", plain(file).rstrip())
    assert len(bar) == 78 and re.match(r"nq-search-r1-grpo-q\u2026 \u2501+ 1 of 1005 steps, 19 h 48 min left, ", bar)
    assert "left, reward 0.500" in bar


def test_a_terminal_shows_the_bar(tmp_path: Path) -> None:
    file = io.StringIO()
    log_to(Console(file=file, force_terminal=True, width=100), tmp_path)
    assert "experiment" in file.getvalue() and "2/2" in file.getvalue()
