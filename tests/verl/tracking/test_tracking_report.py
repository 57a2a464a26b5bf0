"""The report of a run directory that was made by the Tracker and the store themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from omegaconf import OmegaConf
from PIL import Image

from verl.errors import DataError
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking.report import SETTINGS, main, write_report
from verl.tracking.run_data import load_run
from verl.tracking.tracker import Tracker
from verl.tracking.trajectory_store import choose_three, render_trajectory, write_trajectories
from verl.trainer.metrics.batch import step_metrics, validation_metrics

REPO = Path(__file__).resolve().parents[3]
CONFIG = {
    "max_turns": 3,
    "trainer": {"project_name": "search", "experiment_name": "tiny", "seed": 1},
    "algorithm": {"adv_estimator": "grpo"},
}


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids)


def codes(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in text)


def policy(text: str) -> Segment:
    return Segment(Source.POLICY, codes(text), (-0.5,) * len(text))


def episode(source: str, num_searches: int, reward: float) -> Trajectory:
    question = f"Question of {source}?"
    segments = [Segment(Source.PROMPT, codes(question))]
    for hop in range(num_searches):
        segments.append(policy(f"<think>look up {hop}</think>\n<search>entity {hop}</search>"))
        segments.append(Segment(Source.ENVIRONMENT, codes(f"\n\n<information>Doc 1(Title: x) {hop}</information>\n\n")))
    segments.append(policy(f"<answer>{'right' if reward else 'wrong'}</answer>"))
    row = {"reward_model": {"ground_truth": {"target": ["right"]}}}
    return Trajectory(
        source,
        Prompt(codes(question), source, row),
        segments,
        Status.ANSWERED,
        num_turns=num_searches + 1,
        num_valid_actions=num_searches + 1,
        num_searches=num_searches,
        reward=reward,
    )


def failed(source: str) -> Trajectory:
    prompt = Prompt(codes("Lost?"), source, {})
    return Trajectory(source, prompt, [Segment(Source.PROMPT, codes("Lost?"))], Status.FAILED, failure="no retriever")


def validation(num_right_of_4: int) -> list[Trajectory]:
    two_hop = [episode("tinywiki_2hop", 2, float(i < num_right_of_4)) for i in range(4)]
    return [episode("tinywiki_1hop", 1, 1.0), *two_hop]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 0 (validation only) to 4; step 2 has a failed trajectory and a NaN; validations at 0 and 4."""
    with Tracker([], "search", "tiny", tmp_path, CONFIG) as tracker:
        tracker.log(validation_metrics(validation(0)) | {"timing_s/testing": 5.0}, step=0)
        tracker.log(validation_metrics(validation(1), "test"), step=0)
        for step in range(1, 5):
            rollouts = [episode("tinywiki_2hop", 2, float(i < step)) for i in range(4)]
            rollouts += [failed("tinywiki_2hop")] if step == 2 else []
            seconds = {"gen": 6.0, "update_actor": 3.0, "step": 10.0}
            loss = float("nan") if step == 2 else 0.1
            tracker.log(step_metrics(rollouts, None, seconds=seconds) | {"actor/pg_loss": loss}, step)
            write_trajectories(tmp_path, "train", step, rollouts, decode)
        tracker.log(validation_metrics(validation(3)) | {"timing_s/testing": 5.0}, step=4)
        tracker.log(validation_metrics(validation(4), "test"), step=4)
    for step, num_right in ((0, 0), (4, 3)):
        write_trajectories(tmp_path, "val", step, validation(num_right), decode)
    return tmp_path


def section(report: str, title: str) -> str:
    return report.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_scores_before_and_after(run_dir: Path) -> None:
    report = write_report(run_dir).read_text()
    assert report.startswith("# Run tiny\n\nSteps 0 to 4. Mean training reward: 0.625 over")
    rows = cells(section(report, "Before and after: validation"))[2:]
    assert rows == [
        ["tinywiki_1hop", "1", "1.000", "0", "1.000", "4", "+0.000", "1.00 to 1.00", "1.00 to 1.00"],
        ["tinywiki_2hop", "4", "0.000", "0", "0.750", "4", "+0.750", "2.00 to 2.00", "1.00 to 1.00"],
        ["**all**", "5", "0.200", "0", "0.800", "4", "+0.600", "1.80 to 1.80", "1.00 to 1.00"],
    ]
    test_rows = cells(section(report, "Before and after: test"))[2:]
    assert test_rows[-1][2:7] == ["0.400", "0", "1.000", "4", "+0.600"]
    assert "anchor" not in report  # no such validation was run


def test_a_chat_models_scores_say_how_often_a_turn_has_several_calls(tmp_path: Path) -> None:
    with Tracker([], "search", "chat", tmp_path, CONFIG) as tracker:
        for step, calls in ((0, [{}]), (3, [{}, {}])):
            rollouts = validation(2)
            for one in rollouts[1:]:
                one.events = [{"calls": calls}]
            tracker.log(validation_metrics(rollouts), step)
    [header, _, *rows] = cells(section(write_report(tmp_path).read_text(), "Before and after: validation"))
    assert header[-1] == "several calls in a turn"
    assert [row[-1] for row in rows] == ["-", "0.00 to 1.00", "0.00 to 1.00"]


def test_time_by_phase(run_dir: Path) -> None:
    """Whole: 5 s at step 0, 10 s at steps 1 to 3, and 14 s at step 4, where gen + update + testing exceed the step."""
    rows = cells(section(write_report(run_dir).read_text(), "Time"))[2:]
    assert rows == [
        ["gen", "24.0", f"{24 / 49:.1%}"],
        ["update_actor", "12.0", f"{12 / 49:.1%}"],
        ["testing", "10.0", f"{10 / 49:.1%}"],
        ["rest", "3.0", f"{3 / 49:.1%}"],
        ["**all**", "49.0", "100.0%"],
    ]


def test_anomalies_are_named(run_dir: Path) -> None:
    lines = section(write_report(run_dir).read_text(), "Anomalies").strip().splitlines()
    assert lines == [
        "- Failed trajectories (`env/failed_ratio`) in 1 step (2); most in step 2: 20.0%.",
        "- `actor/pg_loss` was NaN or infinite in 1 step (2).",
    ]


def test_a_clean_run_has_no_anomalies(tmp_path: Path) -> None:
    with Tracker([], "search", "tiny", tmp_path, CONFIG) as tracker:
        tracker.log(step_metrics([episode("a", 1, 1.0)], None), 1)
        tracker.log(step_metrics([episode("a", 1, 1.0)], None), 2)
    assert section(write_report(tmp_path).read_text(), "Anomalies").strip() == "- None found."


def test_missing_steps_and_no_signal_are_named(tmp_path: Path) -> None:
    with Tracker([], "search", "tiny", tmp_path, CONFIG) as tracker:
        for step in (1, 4):
            metrics = {"critic/score/mean": 0.5, "critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
            tracker.log(metrics, step)
    anomalies = section(write_report(tmp_path).read_text(), "Anomalies")
    assert "All advantages were zero, so nothing could be learned, in 2 steps (1, 4)." in anomalies
    assert "No training reward was logged in 2 steps (2, 3)." in anomalies


def test_settings_come_from_the_config(run_dir: Path) -> None:
    rows = cells(section(write_report(run_dir).read_text(), "Settings"))[2:]
    always = [["`max_turns`", "`3`"], ["`algorithm.adv_estimator`", "`grpo`"], ["`trainer.seed`", "`1`"]]
    assert rows[:3] == always
    assert [row[0] for row in rows[3:]] == ["`trainer.project_name`", "`trainer.experiment_name`"]


def test_settings_that_are_not_as_by_default_are_listed(tmp_path: Path) -> None:
    """Not those that follow one that is; but those that nobody here knows, and what a free mapping has."""
    changed = {
        **{"agent.compact_at": 237, "actor_rollout_ref.rollout.val_kwargs.temperature": 0.6, "of_a_later_version": 1},
        **{"data.max_prompt_length": 290, "reward.kwargs.k": 2, "trainer.logger": ["console"]},
    }
    tree = OmegaConf.load(REPO / "configs" / "ppo_trainer.yaml")
    for path, value in changed.items():
        OmegaConf.update(tree, path, value)
    tree.agent.summary_request = "Sum up.\nAs a `list`" + 200 * "."
    tree.critic.model.path = "/home/another" + tree.critic.model.path.removeprefix("~")
    config = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))
    with Tracker([], "search", "tiny", tmp_path, config) as tracker:
        tracker.log({"critic/score/mean": 0.5}, 1)
    shown = {name.strip("`"): value for name, value in cells(section(write_report(tmp_path).read_text(), "Settings"))}
    assert shown.pop("agent.summary_request") == "`` Sum up.\\nAs a `list`" + 180 * "." + "... ``"
    assert changed.items() <= {name: yaml.safe_load(value.strip("`")) for name, value in shown.items()}.items()
    assert shown.keys() == changed.keys() | {"setting", "---"} | {key for key in SETTINGS if key in shown}
    assert "critic.model.path" not in shown, "it is as by default in the home of who ran it"


def test_data_sources_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    sources = ["10hop", "9hop", "nq", "hop", "2wiki"]
    with Tracker([], "search", "tiny", tmp_path, CONFIG) as tracker:
        tracker.log(validation_metrics([episode(source, 1, 1.0) for source in sources]), step=0)
    rows = cells(section(write_report(tmp_path).read_text(), "Before and after: validation"))[2:]
    assert [row[0] for row in rows] == ["2wiki", "9hop", "10hop", "hop", "nq", "**all**"]
    logged = (tmp_path / "metrics.jsonl").read_text()
    assert logged.index("test_score/9hop") < logged.index("test_score/10hop")


def test_three_trajectories_from_the_last_validation(run_dir: Path) -> None:
    text = write_report(run_dir).read_text().split("## Trajectories to read (val, step 4)", 1)[1]
    titles = [line for line in text.splitlines() if line.startswith("### ")]
    assert titles == ["### Solved with several searches", "### Not solved", "### Drawn at random"]
    solved = text.split("### ")[1]
    assert "status answered, reward 1.000, 3 turns, 2 searches, expected `right`." in solved
    assert "\n<think>look up 1</think>\n<search>entity 1</search>\n" in solved
    assert "> <information>Doc 1(Title: x) 1</information>\n" in solved  # what the policy did not write is quoted
    assert "\n<answer>right</answer>\n" in solved
    assert "\n<answer>wrong</answer>\n" in text.split("### ")[2]


def test_the_picture_is_a_picture(run_dir: Path) -> None:
    write_report(run_dir)
    with Image.open(run_dir / "report.png") as image:
        assert image.width >= 1000 and image.height >= 600
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=2**24) or []}
    assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= colours  # a line for each of the two sources


def test_a_dollar_in_a_name_is_no_formula(tmp_path: Path) -> None:
    name = r"cost_$5_to_$10 $\frac$"
    with Tracker([], name, name, tmp_path, {"trainer": {"project_name": name, "experiment_name": name}}) as tracker:
        tracker.log({"val/test_score/a": 0.25, f"val/test_score/{name}": 0.5}, step=1)
    assert name in write_report(tmp_path).read_text()


def row(reward: float | None, num_searches: int, status: str = "answered") -> dict[str, object]:
    return {"reward": reward, "num_searches": num_searches, "status": status}


def test_choice_of_three() -> None:
    rows = [row(1.0, 1), row(0.5, 2), row(None, 0, "failed"), row(0.0, 1)]
    assert choose_three(rows)[:2] == [("Solved with several searches", rows[1]), ("Not solved", rows[3])]
    assert choose_three([row(1.0, 1)]) == [("Solved", row(1.0, 1))]
    assert choose_three([row(None, 0, "failed")]) == [("Not solved", row(None, 0, "failed"))]
    assert choose_three([]) == []


def test_sequences_are_shown_in_order() -> None:
    segments = [
        ("prompt", "P"),
        ("policy", "one"),
        ("context", "C1"),
        ("environment", "hm"),
        ("context", "C2"),
        ("policy", "two"),
    ]
    stored: dict[str, object] = dict.fromkeys(("reward", "ground_truth", "failure"))
    stored |= {"data_source": "a", "status": "answered", "num_turns": 2, "num_searches": 0, "prompt_text": "P"}

    def shown(parts: list[tuple[str, str]]) -> list[str]:
        stored["segments"] = [{"source": source, "text": text} for source, text in parts]
        lines = render_trajectory(stored).splitlines()[1:]
        return [line for line in lines if line not in ("", ">", "```text", "```", "> ```text", "> ```")]

    first, second, third = (f"**Sequence {number} of 3**" for number in (1, 2, 3))
    assert shown(segments) == [
        *(first, "> *prompt*", "> P", "one"),
        *(second, "> *context*", "> C1", "> *environment*", "> hm"),
        *(third, "> *context*", "> C2", "two"),
    ]  # fmt: skip
    assert shown(segments[:2]) == ["> *prompt*", "> P", "one"]


def test_backquotes_in_text_do_not_end_the_block(tmp_path: Path) -> None:
    stored = {
        "data_source": "a",
        "status": "answered",
        "reward": None,
        "num_turns": 1,
        "num_searches": 0,
        "ground_truth": None,
        "failure": None,
        "prompt_text": "p",
        "segments": [{"source": "policy", "num_tokens": 1, "text": "```\n# heading"}],
    }
    assert "````text\n```\n# heading\n````" in render_trajectory(stored)


def test_a_resumed_step_counts_once_and_a_cut_last_line_is_ignored(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "time": 1, "critic/score/mean": 0.125}\n{"step": 5, "tim')
    run = load_run(run_dir)
    assert run.curve("critic/score/mean") == {1: 0.25, 2: 0.5, 3: 0.75, 4: 0.125}


def test_broken_or_missing_metrics(run_dir: Path, tmp_path: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text("oops\n" + path.read_text())
    with pytest.raises(DataError, match="line 1"):
        write_report(run_dir)
    path.write_text("")
    with pytest.raises(DataError, match="no step"):
        write_report(run_dir)
    with pytest.raises(DataError, match="default_local_dir"):
        write_report(tmp_path / "elsewhere")


def test_command_line(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "verl.tracking.report", str(run_dir)]
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run_dir / "report.md")
    assert main([str(tmp_path / "elsewhere")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
