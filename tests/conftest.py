"""Shared by all tests: a small tokenizer and model, Ray, and a TinyWiki with a policy and a retrieval server."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from async_runs import STEPS, Command
from e2e_world import ENV, GRADIENT, ROOT, free_port, small_run, wait_until_up
from tiny_models import qwen2_config, save_untrained
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl.process.startup import collect_rarely

pytest_plugins = ["tiers", "time_limits"]

EOS = "<|endoftext|>"


def pytest_collection_finish() -> None:
    collect_rarely()  # thousands of tests are objects that each collection would look at


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries complain, at the end of the process, of objects that are left


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, 300 entries: any text survives, and one character is often several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[EOS, "<|pad|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    corpus = ["<search> the river </search>\n\n<information>Doc 1(Title: x) text</information>\n\n<answer> a </answer>"]
    tokenizer.train_from_iterator(corpus * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token="<|pad|>")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: PreTrainedTokenizerFast) -> Path:
    """An untrained Qwen2 of 0.3 million parameters in Hugging Face format, with `byte_tokenizer`.

    Its weights are five times larger than usual, so that its distributions are far from uniform.
    """
    tokenizer = byte_tokenizer
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    others = special | {"initializer_range": 0.1, "tie_word_embeddings": True, "dtype": "float32"}
    config = qwen2_config(len(tokenizer), 96, 256, 3, (3, 1), 1024, **others)
    path = tmp_path_factory.mktemp("tiny_model")
    save_untrained(config, path)
    byte_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """Ray on this machine, for all tests that need it. Workers can import the helper modules that lie beside tests."""
    import ray

    from verl.single_controller.cluster import RAY_SETTINGS, init_patiently

    os.environ.update(RAY_SETTINGS)
    folders = [path for path in sys.path if Path(path).is_relative_to(Path(__file__).parent)]
    init_patiently(
        num_cpus=4,
        num_gpus=8,  # said, not there: what is placed on them is asked where it sits
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """A folder that the first process of the test session fills; under pytest-xdist the others wait and share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def build(name: str, fill: Callable[[Path], None]) -> Path:
        folder, filled = shared / name, shared / f"{name}.filled"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not filled.exists():
                folder.mkdir(exist_ok=True)
                fill(folder)
                filled.touch()
        return folder

    return build


@pytest.fixture(scope="session")
def quickstart(built_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """README's first command, smaller: its folder, with what it printed in files `stdout` and `stderr`."""
    more = ("trainer.logger=[console,tensorboard,wandb]", "+trainer.val_before_train=true", *GRADIENT)
    command = ("bash", "scripts/quickstart.sh", "--small", "--seed", "1", "--output_dir")

    def start(folder: Path) -> None:
        with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
            done = subprocess.run(
                [*command, str(folder), "--", *more, "trainer.n_gpus_per_node=1"],
                cwd=ROOT, env=ENV | {"VERL_WORKER_LOGS": "1"}, stdout=stdout, stderr=stderr, timeout=1800, check=False,
            )  # fmt: skip
        said = [(folder / name).read_text()[-6000:] for name in ("stdout", "stderr")]
        assert done.returncode == 0, "\n".join(said)

    return built_once("quickstart", start)


@pytest.fixture(scope="session")
def tinywiki(quickstart: Path) -> Path:
    return quickstart / "data"


@pytest.fixture(scope="session")
def policy(quickstart: Path) -> Path:
    """A policy that has seen the tag grammar: enough to search, far from enough to be right."""
    return quickstart / "sft" / "global_step_60"


@pytest.fixture(scope="session")
def start_retriever() -> Iterator[Callable[..., str]]:
    """Starts a server on a free port and returns its /retrieve URL."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(corpus: Path, *arguments: str) -> str:
        port = free_port()
        environment = ENV | {"CORPUS_PATH": str(corpus), "PORT": str(port)}
        server = subprocess.Popen(["bash", "retrieval_launch.sh", *arguments], cwd=ROOT, env=environment)
        servers.append(server)
        wait_until_up(server, f"http://127.0.0.1:{port}/readyz")
        return f"http://127.0.0.1:{port}/retrieve"

    yield start
    for server in servers:
        server.terminate()
        server.wait(timeout=120)


@pytest.fixture(scope="session")
def tinywiki_url(tinywiki: Path, start_retriever: Callable[..., str]) -> str:
    return start_retriever(tinywiki / "corpus.jsonl")


@pytest.fixture
def async_command(tinywiki: Path, policy: Path, tinywiki_url: str) -> Command:
    """The command of a run of `STEPS` steps in a folder, with further overrides."""

    def make(folder: Path, *overrides: str) -> tuple[str, ...]:
        return small_run(tinywiki, policy, tinywiki_url, folder, f"trainer.total_training_steps={STEPS}", *overrides)

    return make


@pytest.fixture(scope="session")
def one_host(
    ray_session: Any,
    tinywiki: Path,
    policy: Path,
    tinywiki_url: str,
    built_once: Callable[[str, Callable[[Path], None]], Path],
) -> Any:
    """A `runs_on_hosts.OneHost`."""
    from runs_on_hosts import OneHost

    return OneHost(tinywiki, policy, tinywiki_url, built_once)
