"""What the engine's tests share: a tiny model, a batch like a search agent's, and losses written out on full logits."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from run_config import run_config
from tiny_models import qwen2_config, save_untrained
from transformers import AutoModelForCausalLM

from verl.config import Config
from verl.engine.policy_engine import PolicyEngine
from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory

VOCABULARY = 61
CPU = torch.device("cpu")


def write_model(path: Path, seed: int = 0, tied: bool = True) -> str:
    """A 2-layer Qwen2 whose predictions are far from uniform."""
    config = qwen2_config(VOCABULARY, 32, 64, 2, (4, 2), 128, tie_word_embeddings=tied, initializer_range=0.3)
    return str(save_untrained(config, path, seed))


def make_config(model_path: str, run_dir: Path | str, *overrides: str) -> Config:
    config = copy.deepcopy(_composed(model_path, overrides))
    config.trainer.default_local_dir = str(run_dir)
    return config


@cache
def _composed(model_path: str, overrides: tuple[str, ...]) -> Config:
    """Reading the overrides takes as long as making an engine."""
    return run_config(
        [
            "data.train_files=train.parquet",
            "data.val_files=test.parquet",
            f"actor_rollout_ref.model.path={model_path}",
            "trainer.device=cpu",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            *overrides,
        ]
    )


def make_engine(
    model_path: str, run_dir: Path | str, *overrides: str, anchor_path: str | None = None, **options: Any
) -> PolicyEngine:
    """`anchor_path`: where the anchor's weights come from, when not from `model_path`."""
    settings = {"total_training_steps": 10, "with_anchor": anchor_path is not None} | options
    if anchor_path is not None:
        overrides += (f"actor_rollout_ref.ref.path={anchor_path}",)
    return PolicyEngine(make_config(model_path, run_dir, *overrides), CPU, **settings)


def make_batch(num_rows: int = 7, seed: int = 0) -> TrainBatch:
    """Rows of prompt, policy, environment, policy tokens, two of each prompt; old and reference log-probs near the tiny
    model's scale.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())

    def policy() -> Segment:
        tokens = ids(2, 9)
        return Segment(Source.POLICY, tokens, (-1.0,) * len(tokens))

    trajectories: list[Trajectory] = []
    prompt: tuple[int, ...] = ()
    for row in range(num_rows):
        prompt = prompt if row % 2 else ids(2, 8)
        segments = [Segment(Source.PROMPT, prompt), policy(), Segment(Source.ENVIRONMENT, ids(3, 12)), policy()]
        trajectory = Trajectory(str(row // 2), Prompt(prompt, "test", {}), segments, Status.ANSWERED)
        trajectory.reward = float(row % 3 == 0)
        trajectories.append(trajectory)
    batch = TrainBatch.from_trajectories(trajectories)
    num_tokens = len(batch.tokens["ids"])
    for name, scale in (("old_log_probs", 1.0), ("ref_log_probs", 1.0)):
        batch.tokens[name] = -4.0 + scale * torch.randn(num_tokens, generator=generator)
    batch.tokens["advantages"] = torch.randn(num_tokens, generator=generator)
    return batch


def full_logits(model_path: str, batch: TrainBatch) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A plain Hugging Face model and, row by row, its logits [L, V] in float64: no padding, no chunks, no sharding."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, attn_implementation="eager")
    rows = batch.tokens["ids"].split(batch.lengths_B.tolist())
    return model, [model(input_ids=ids[None], use_cache=False).logits[0] for ids in rows]


def log_softmax_rows(logits: list[torch.Tensor], temperature: float) -> torch.Tensor:
    """[T, V] log-probs where entry t predicts token t; a row's first entry is uniform and never used."""
    parts = []
    for logits_LV in logits:
        first_V = torch.zeros_like(logits_LV[:1])
        parts.append(torch.cat([first_V, logits_LV[:-1]]) / temperature)
    return torch.cat(parts).log_softmax(-1)


def relative_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|actual - expected| / |expected| over all parameters together."""
    assert actual.keys() == expected.keys()
    difference = sum(float((actual[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(float(expected[n].double().square().sum()) for n in expected)
    assert size > 0
    return (difference / size) ** 0.5
