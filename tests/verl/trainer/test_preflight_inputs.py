"""What the trainer checks first."""

from __future__ import annotations

from pathlib import Path

import pytest
from preflight_run import small_run

from verl.config import load_config
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.trainer.preflight import check_inputs


def test_a_run_that_can_start_leaves_no_trace(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, osk_url: str
) -> None:
    settings = small_run(prompt_file, tmp_path / "run", tiny_model_dir, f"retriever.url={osk_url}")
    check_inputs(load_config("ppo_trainer", settings))
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        # The model was made for 1024 tokens; 910 of them are the prompt's.
        (["data.max_response_length=115"], ConfigError, "= 1025 tokens, but .* was made for 1024"),
        (
            [
                "data.max_response_length=115",
                "+actor_rollout_ref.model.override_config={max_position_embeddings: 1025}",
            ],
            EnvironmentUnavailable,  # the window is large enough now, and the next thing is wrong
            "http://127.0.0.1:1/retrieve",
        ),
        (["trainer.default_local_dir=/dev/null/run"], ConfigError, "run folder: /dev/null/run: /dev/null is a file"),
        (["data.tokenizer=/no/such/folder"], ConfigError, "no tokenizer could be loaded"),
        (["reward.function=no.such.Reward"], ConfigError, "no.such"),
    ],
)
def test_what_is_wrong_is_said(
    overrides: list[str], kind: type[Exception], message: str, prompt_file: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    url = "retriever.url=http://127.0.0.1:1/retrieve"
    settings = small_run(prompt_file, tmp_path / "run", tiny_model_dir, url, *overrides)
    with pytest.raises(kind, match=message):
        check_inputs(load_config("ppo_trainer", settings))
