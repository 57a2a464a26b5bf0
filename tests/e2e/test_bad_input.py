"""What a user sees when something is wrong: one clear error, no traceback, nothing started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_world import ENV, ROOT, free_port, run_here

Refusal = Callable[[list[str]], str]
NOBODY = "http://127.0.0.1:1"


def command(tinywiki: Path, policy: Path, url: str, run_dir: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "tinywiki"),
        *(f"data.train_files={tinywiki / 'train.parquet'}", f"data.val_files={tinywiki / 'validation.parquet'}"),
        *(f"actor_rollout_ref.model.path={policy}", f"retriever.url={url}", f"trainer.default_local_dir={run_dir}"),
        *("data.train_batch_size=4", "data.val_data_num=4", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
        *("trainer.logger=[]", *overrides),
    ]


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str]) -> Refusal:
    """The error of a command that must end with status 2, in this process: in one of its own it is read below."""

    def refused(arguments: list[str]) -> str:
        assert run_here(*arguments[1:]) == 2
        return capfd.readouterr().err

    return refused


def test_retriever_not_reachable_at_start(tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/retrieve"
    arguments = command(tinywiki, policy, url, tmp_path)
    done = subprocess.run(arguments, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert url in done.stderr and "retrieval_launch.sh" in done.stderr
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_prompt_file_missing(refusal: Refusal, tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    missing = tmp_path / "absent.parquet"
    assert str(missing) in refusal(command(tinywiki, policy, NOBODY, tmp_path, f"data.train_files={missing}"))


def test_prompt_file_without_its_column(refusal: Refusal, tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.parquet"
    pq.write_table(pa.table({"question": ["Who?"]}), file)
    error = refusal(command(tinywiki, policy, NOBODY, tmp_path, f"data.train_files={file}"))
    assert str(file) in error and "prompt" in error


def test_prompt_longer_than_the_limit(
    refusal: Refusal, tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path
) -> None:
    error = refusal(command(tinywiki, policy, tinywiki_url, tmp_path, "data.max_start_length=8"))
    assert "row" in error and "train.parquet" in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.actor.optim.lrr=1"], "actor_rollout_ref.actor.optim.lr"),
        (["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=false"], "critic.model.path="),
        (["algorithm.use_kl_in_reward=true"], "exclude each other"),
    ],
)
def test_config_that_cannot_train(
    refusal: Refusal, overrides: list[str], message: str, tinywiki: Path, policy: Path, tmp_path: Path
) -> None:
    assert message in refusal(command(tinywiki, policy, NOBODY, tmp_path, *overrides))
