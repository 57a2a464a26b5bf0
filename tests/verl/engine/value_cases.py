"""What the critic's tests share: a tiny critic, a batch with targets, the definition on full outputs, two workers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import CPU, VOCABULARY, make_batch, make_config
from engine_state import gradients, whole_weights
from forked import run_forked
from tiny_models import qwen2_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2ForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2ForTokenClassification,
)

from verl.config import Config
from verl.engine.value_engine import ValueEngine
from verl.errors import NumericalError
from verl.protocol import TrainBatch
from verl.workers.critic import CriticWorker

CLIP = 0.5


def write_critic(path: Path) -> str:
    """A 2-layer Qwen2 critic whose head is not zero, with a tokenizer. Its config says nothing of dropout: 0.1."""
    torch.manual_seed(0)
    config = qwen2_config(VOCABULARY, 32, 64, 2, (4, 2), 128, initializer_range=0.3, num_labels=1)
    model = Qwen2ForTokenClassification(config)
    torch.nn.init.constant_(model.score.bias, 0.25)
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(path)
    return str(path)


def write_gpt2_critic(path: Path) -> str:
    """Another family: a head and a decoder of other names, and dropout of 0.1 everywhere."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, num_labels=1
    )
    GPT2ForTokenClassification(config).save_pretrained(path)
    return str(path)


def value_config(path: str, run_dir: Path | str, *overrides: str) -> Config:
    settings = [f"critic.model.path={path}", f"critic.cliprange_value={CLIP}", "critic.optim.lr=1e-2"]
    return make_config(path, run_dir, *settings, *overrides)


def value_engine(path: str, run_dir: Path | str, *overrides: str) -> ValueEngine:
    return ValueEngine(value_config(path, run_dir, *overrides), CPU, total_training_steps=10)


def value_batch(num_rows: int = 7, seed: int = 0) -> TrainBatch:
    """Old values and returns of the size of the tiny critic's values, so that some tokens are clipped."""
    batch = make_batch(num_rows, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name in ("values", "returns"):
        batch.tokens[name] = torch.randn(len(batch.tokens["ids"]), generator=generator)
    return batch


def defined_values(path: str, batch: TrainBatch) -> tuple[torch.nn.Module, torch.Tensor]:
    """A plain Hugging Face critic and its values [T] in float64, row by row; a row's first token has the value 0."""
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    model.eval()
    parts = []
    for ids_L in batch.tokens["ids"].split(batch.lengths_B.tolist()):
        after_L = model(input_ids=ids_L[None]).logits[0, :, 0]  # output t has read token t
        parts.append(torch.cat([torch.zeros(1, dtype=torch.float64), after_L[:-1]]))
    return model, torch.cat(parts)


def weights(engine: ValueEngine) -> dict[str, torch.Tensor]:
    return whole_weights(engine)


TWO_WORKER_CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "all_at_once": (12, ()),
    "token_budget": (12, ("critic.ppo_max_token_len_per_gpu=40",)),
    "fixed_rows": (12, ("critic.use_dynamic_bsz=false", "critic.ppo_micro_batch_size=4")),
    "one_row_for_two_workers": (1, ()),
}
MINI_BATCHES = ("critic.ppo_mini_batch_size=5", "critic.ppo_max_token_len_per_gpu=60", "critic.ppo_epochs=2")


def evaluate(worker: CriticWorker, path: str, folder: Path) -> dict[str, Any]:
    """What a started worker answers; every rank calls it."""
    results: dict[str, Any] = {"gradients": {}}
    for name, (num_rows, overrides) in TWO_WORKER_CASES.items():
        results["gradients"][name] = gradients(value_engine(path, folder, *overrides), value_batch(num_rows))
    batch = value_batch(12)
    results["values"] = tuple(worker.engine.values(batch))
    results["metrics"] = [worker.engine.update(batch) for _ in range(3)]
    results["weights"] = weights(worker.engine)
    worker.save(str(folder / "saved"))
    results["repeated"] = []
    for _ in range(2):  # from the start again
        worker.load(path)
        results["repeated"].append(worker.engine.update(batch))
    worker.scale_lr(0.5)
    results["halved"] = worker.engine.update(batch)["critic/lr"]
    batch.tokens["returns"].fill_(float("nan"))
    try:
        worker.engine.update(batch)
    except NumericalError as error:
        results["message"] = str(error)
    return results


def share_rows(folder: Path, path: str, _: str) -> dict[str, Any]:
    """Two ranks that have the same rows."""
    shared = ("critic.ulysses_sequence_parallel_size=2", "critic.model.use_remove_padding=true")
    found = {
        name: gradients(value_engine(path, folder, *shared, *overrides), value_batch(num_rows))
        for name, (num_rows, overrides) in TWO_WORKER_CASES.items()
    }
    engine = value_engine(path, folder, *shared, *MINI_BATCHES)
    return {
        "gradients": found,
        "values": tuple(engine.values(value_batch(12))),
        "metrics": engine.update(value_batch(12)),
    }


def run_two_workers(path: str, folder: Path) -> list[dict[str, Any]]:
    """The results of two critic workers, each in a process of its own, which meet where the first one says."""
    host = CriticWorker(value_config(path, folder), 10, 0, 2)  # keeps the port
    run_forked(_worker, (path, str(folder), host.rendezvous()), 2)
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(2)]


def _worker(rank: int, path: str, folder: str, address: str) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    worker = CriticWorker(value_config(path, folder, *MINI_BATCHES), 10, rank, 2)
    worker.start(address)
    torch.save(evaluate(worker, path, Path(folder)), Path(folder) / f"rank_{rank}.pt")
    dist.destroy_process_group()
