"""What is written, printed or sent holds no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from url_text import mask_text
from verl.config import load_config_from_argv
from verl.process.secrets import mask_secrets
from verl.tracking.tracker import Tracker
from verl.trainer.main_ppo import main

SECRET = "hunter2-hunter2"
REWARD = {
    "components": {"judge": {"api_key_env": "JUDGE_KEY", "api_key": SECRET, "extra_body": {"X-API-KEY": SECRET}}},
    "endpoints": [f"http://user:{SECRET}@judge/v1?model=m", f"https://judge/v1?api_key={SECRET}&n=1#top"],
    "headers": {"Authorization": f"Bearer {SECRET}"},
    "credentials": {"user": SECRET},
    "judges": [{"wandb_token": SECRET, "password": None, "topk": 3}],
    "note": f"send authorization: bearer {SECRET}, please",
}


def test_what_is_masked_and_what_stays() -> None:
    assert mask_secrets(REWARD) == {
        "components": {"judge": {"api_key_env": "JUDGE_KEY", "api_key": "***", "extra_body": {"X-API-KEY": "***"}}},
        "endpoints": ["http://***@judge/v1?model=m", "https://judge/v1?api_key=***&n=1#top"],
        "headers": {"Authorization": "***"},
        "credentials": {"user": "***"},
        "judges": [{"wandb_token": "***", "password": None, "topk": 3}],
        "note": "send authorization: bearer ***, please",
    }


@pytest.mark.parametrize(
    "value",
    [
        {"url": "http://127.0.0.1:8000/a@b"},
        {"max_tokens": 500, "prompt_key": "prompt", "reward_fn_key": "data_source", "tokenizer": "gpt2"},
        {"kl_topk_tokens": 32, "api_key_env": "SERPER_API_KEY", "password": None, "token": ""},
        {"endpoint": "https://host/v1?max_tokens_a=5&monkey=7", "text": "the bearer of the ring"},
    ],
)
def test_what_is_no_secret_stays(value: dict[str, Any]) -> None:
    assert mask_secrets(value) == value


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "SERPER_API_KEY", "OPENAI_API_KEY", "RETRIEVAL_AUTH_TOKEN"]
)
def test_values_of_secret_variables_are_found_anywhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f" {SECRET}\n")
    monkeypatch.setenv("ANOTHER_TOKEN", SECRET[:9])  # a part of it
    assert mask_text(f"https://hub/{SECRET}/model said {SECRET}!") == "https://hub/***/model said ***!"
    monkeypatch.setenv("SHORT_TOKEN", "hub")  # too short to be told from a word
    assert mask_text("https://hub/") == "https://hub/"


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + SECRET)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {
        "retriever": {"url": f"http://user:{SECRET}@127.0.0.1:8000/retrieve,http://b:{SECRET}@127.0.0.1:8001/retrieve"},
        "reward": {"kwargs": REWARD},
        "model": {"path": f"hub/hf_{SECRET}/x"},
    }
    with Tracker(["console", "tensorboard", "wandb"], "project", "experiment", tmp_path, config) as tracker:
        tracker.log({"critic/score/mean": 0.25}, step=1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 4
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["retriever"]["url"] == "http://***@127.0.0.1:8000/retrieve,http://***@127.0.0.1:8001/retrieve"
    assert written["model"]["path"] == "hub/***/x"
    assert config["reward"]["kwargs"] is REWARD and REWARD["components"]["judge"]["api_key"] == SECRET


def test_printed_settings_hold_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config_from_argv(
            [f"retriever.url='http://user:{SECRET}@h:1/retrieve'", f"+reward.kwargs.api_key={SECRET}", "--cfg", "job"]
        )
    printed = capsys.readouterr().out
    assert SECRET not in printed
    assert yaml.safe_load(printed)["retriever"]["url"] == "http://***@h:1/retrieve"


def test_an_error_that_ends_a_run_holds_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"trainer.total_training_steps='http://user:{SECRET}@h:1'"]) == 2
    said = capsys.readouterr().err
    assert SECRET not in said and "http://***@h:1" in said
