"""What a trained engine holds, gathered: whole weights, and whole gradients of a mini-batch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.engine.device.sharding import on_mesh, reshard
from verl.engine.merging import merged_tensors
from verl.engine.policy_engine import PolicyEngine
from verl.engine.trained import TrainedEngine
from verl.engine.value_engine import ValueEngine
from verl.phases import Phase
from verl.protocol import TrainBatch


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered to all ranks (a collective), detached, in memory of its own, on the CPU."""
    tensor = tensor.detach()
    full = on_mesh(tensor).full_tensor() if isinstance(tensor, DTensor) else tensor
    return torch.empty(full.shape, dtype=full.dtype).copy_(full)


def whole_weights(engine: TrainedEngine, of: str = "policy") -> dict[str, torch.Tensor]:
    """By Hugging Face name, float32, adapters merged; a tied head is there once. On every rank, which all call it."""
    model = engine.model_of(of) if isinstance(engine, PolicyEngine) else engine.model
    reshard(model)
    return {name: whole(tensor) for name, tensor in merged_tensors(model)}


def full_state(engine: TrainedEngine, of: str = "policy") -> dict[str, torch.Tensor]:
    """`whole_weights` on rank 0, {} on the others."""
    weights = whole_weights(engine, of)
    return weights if dist.get_rank() == 0 else {}


def assert_same_weights(one: PolicyEngine, other: PolicyEngine) -> None:
    """To the bit, those of the policy and of the anchor."""
    for of in ("policy", "anchor"):
        states = full_state(one, of), full_state(other, of)
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def save_state(engine: TrainedEngine, folder: Path) -> Path:
    """What `load_state` needs, in a folder that is made; every rank calls it."""
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
    dist.barrier()
    engine.start_saving_state(folder)
    engine.resumable.saved()
    dist.barrier()  # rank 0 may write more than its shards
    return folder


def gradients(engine: PolicyEngine | ValueEngine, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """The whole gradient of `batch` taken as one mini-batch, by Hugging Face name. Clips nothing, changes no weight."""
    engine.model.train()
    with engine.residence.during(Phase.UPDATE):
        engine.learner.accumulate(batch, engine.objective if isinstance(engine, PolicyEngine) else engine.loss)
        named = engine.model.model.named_parameters()
        gradient = {name: whole(p.grad) for name, p in named if p.grad is not None}
        engine.learner.optimizer.zero_grad()
        engine.release()
    return gradient
