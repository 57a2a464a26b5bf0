"""Adapters that reach a real engine: it samples from the merged weights, whatever was merged before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rollout_engine import MAX_ERROR, errors, load, sample_all, seeded
from transformers import AutoModelForCausalLM
from weight_source import stream_of

from verl.agent.environment import Generation
from verl.engine.lora import Lora, adapted_layers, add_adapters, begin_adapters
from verl.engine.merging import merged_tensors
from verl.engine.model import CausalModel
from verl.engine.reference_policy import ReferencePolicy
from verl.errors import WeightSyncError
from verl.rollout.weights.adapters import adapters_of, with_adapters

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> CausalModel:
    """With adapters, not sharded."""
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    add_adapters(hf, Lora(4, 6.0, "all-linear"), torch.float32)
    begin_adapters(hf, seed=0)
    return CausalModel(hf, None)


@torch.no_grad()
def train(model: CausalModel, seed: int) -> None:
    """Give B values that change the model clearly."""
    draw = torch.Generator().manual_seed(seed)
    for _, layer in adapted_layers(model):
        layer.lora_B.copy_(0.1 * torch.randn(layer.lora_B.shape, generator=draw))


@pytest.fixture
def prompts(byte_tokenizer: Any) -> list[list[int]]:
    source = random.Random(4)
    return [[source.randrange(2, len(byte_tokenizer)) for _ in range(20)] for _ in range(8)]


def test_an_engine_samples_from_the_merged_weights(
    session: Any, model: CausalModel, prompts: list[list[int]], tiny_model_dir: Path, weight_dir: Path
) -> None:
    def sampled() -> list[Generation]:
        return session.run(sample_all(session.engine, prompts, seeded(prompts)))

    def give(named: Any, version: int, bucket_mib: float = 512) -> None:
        session.run(load(session.engine, stream_of(named, version, weight_dir, bucket_mib=bucket_mib)))

    before = sampled()
    for version in (1, 2, 3):  # each from the base: the last is no sum of the three
        train(model, seed=version)
        give(adapters_of(model).items(), version, 0.02 if version == 2 else 512)
    found = sampled()
    assert [one.ids for one in found] != [one.ids for one in before]
    assert errors(model.model.eval(), prompts, found, 1.0).max() < MAX_ERROR
    give(merged_tensors(model), 4)
    assert sampled() == found, "to the bit what the merged weights themselves give"
    give(adapters_of(ReferencePolicy(model)).items(), 5)
    assert sampled() == before, "to the bit the base, which was never changed"


def test_adapters_alone_travel(model: CausalModel, weight_dir: Path) -> None:
    [bucket] = stream_of(adapters_of(model).items(), 1, weight_dir).buckets
    layers = [layer for _, layer in adapted_layers(model)]
    assert len(bucket.sums) == 2 * len(layers) and all(".lora_" in name for name in bucket.sums)
    sent = sum(4 * tensor.numel() for tensor in adapters_of(model).values())
    assert sent == sum(4 * 4 * (layer.in_features + layer.out_features) for layer in layers)


def test_merging_by_hand_and_a_weight_that_is_not_there() -> None:
    """[1 2] + [10] [3 4], where 10 is alpha / r times B."""
    adapters = {"a.weight.lora_A": torch.tensor([[3.0, 4.0]]), "a.weight.lora_B": torch.tensor([[10.0]])}
    base = [("a.weight", torch.tensor([[1.0, 2.0]]).bfloat16()), ("b.weight", torch.ones(1))]
    merged = dict(with_adapters(base, adapters))
    assert merged["a.weight"].tolist() == [[31.0, 42.0]] and torch.equal(merged["b.weight"], base[1][1])
    with pytest.raises(WeightSyncError, match="1 weights with adapters are not in the files .* is a.weight"):
        list(with_adapters(base[1:], adapters))
