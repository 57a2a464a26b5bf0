"""A new user's first hour: documents, questions, prompt, reward and environment of one's own, typed as a script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_world import ENV, ROOT, free_port, metrics_by_step

from verl.tracking.trajectory_store import read_trajectories

FILES = Path(__file__).parent / "new_user"


@pytest.fixture(scope="module")
def port() -> str:
    """Of the user's retrieval server, which the run remembers."""
    return str(free_port())


@pytest.fixture(scope="module")
def hour(port: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The user's folder at the end of the hour, and all that was printed."""
    folder = tmp_path_factory.mktemp("hour") / "mine"
    shutil.copytree(FILES, folder)
    before = _sources()
    said = _type("hour.sh", folder, PORT=port, MODEL=str(tiny_model_dir))
    assert _sources() == before, "nothing of the clone is edited"
    return folder, said


def _type(script: str, folder: Path, **settings: str) -> str:
    """What a script of the user's printed, itself and into its logs."""
    done = subprocess.run(
        ["bash", script],
        cwd=folder, env=ENV | {"CLONE": str(ROOT)} | settings,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3000, check=False,
    )  # fmt: skip
    logs = "".join(path.read_text() for path in folder.glob("*.log"))
    assert done.returncode == 0 and "== done" in done.stdout, done.stdout[-8000:] + logs[-4000:]
    return done.stdout + logs


def _sources() -> dict[Path, int]:
    folders = ("verl", "search_r1", "scripts", "configs")
    files = (path for name in folders for path in (ROOT / name).rglob("*.[pysh]*"))
    return {path: path.stat().st_mtime_ns for path in files if path.parent.name != "__pycache__"}


def test_no_traceback_is_seen(hour: tuple[Path, str]) -> None:
    assert "Traceback" not in hour[1]


def test_the_policy_is_trained_in_the_users_environment_by_the_users_reward(hour: tuple[Path, str]) -> None:
    folder, _ = hour
    sys.path.insert(0, str(folder))
    try:
        from my_reward import compute_score
    finally:
        sys.path.remove(str(folder))
    passages = [json.loads(line)["contents"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    rewards = []
    for step in (1, 2, 3):
        rows = read_trajectories(folder / "run" / "trajectories" / f"train_step_{step}.parquet")
        assert len(rows) == 16
        for row in rows:
            shelves = [s["text"] for s in row["segments"] if s["source"] == "environment"]
            assert shelves and all(any(passage in text for passage in passages) for text in shelves)
            wrote = "\n".join(s["text"] for s in row["segments"] if s["source"] == "policy")
            rewards.append((row["reward"], wrote))
    assert len({reward for reward, _ in rewards}) > 1, "so there was something to learn from"
    # No answer of an untrained model is right, so its letters are what counts; EOS and padding are none of them.
    letters = [(reward, compute_score("", wrote, {"target": []})) for reward, wrote in rewards if "<|" not in wrote]
    assert len(letters) > 10 and all(reward == pytest.approx(expected) for reward, expected in letters)


def test_the_second_run_in_the_same_folder_is_refused(hour: tuple[Path, str]) -> None:
    folder, printed = hour
    refusal = printed.split("== train once more, by mistake")[1].split("\n== ")[0]
    assert "trainer.resume_mode=auto" in refusal and "trainer.overwrite=archive" in refusal
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3]


def test_the_anchor_follows_and_its_validation_leaves_the_engines_with_the_policys_weights(
    hour: tuple[Path, str],
) -> None:
    """`train_grpo_ema_pg.sh`: the policy is its own anchor before the first update, and not after it."""
    run = hour[0] / "run"
    metrics = metrics_by_step(run)
    assert abs(metrics[1]["actor/kl_loss"]) < 1e-5 < metrics[2]["actor/kl_loss"]
    assert metrics[2]["ref_policy/ema_tau"] == 0.9 and (run / "ref" / "global_step_3" / "model.safetensors").is_file()
    assert [step for step in sorted(metrics) if "val_ref/test_score/mean" in metrics[step]] == [1, 2, 3]
    assert metrics[3]["health/mismatch/mean_abs"] < 1e-4


def test_the_run_is_evaluated_by_its_own_settings(hour: tuple[Path, str]) -> None:
    folder, _ = hour
    report = (folder / "results" / "results.md").read_text()
    assert "| lighthouses | 20 |" in report and "wrong_answers.md" in report, report
    wrong = (folder / "results" / "wrong_answers.md").read_text()
    assert "question: Who built Skarn Light?" in wrong and "gold answers: Josse Aldine" in wrong
    assert "searches: Who built Skarn Light?" in wrong, "what the user's environment asked"


@pytest.mark.slow  # the rehearsal of the quickstart asks a run, too, and test_serve_engine.py serves a model
def test_the_run_is_asked_and_served_by_its_own_settings(hour: tuple[Path, str], port: str) -> None:
    printed = _type("ask_and_serve.sh", hour[0], PORT=port, SERVE_PORT=str(free_port()))
    assert "Traceback" not in printed
    assert "<shelf>" in printed.split("== ask")[1].split("\n== ")[0]
    served = printed.split("== serve")[1]
    assert "model " in served and "reply " in served
