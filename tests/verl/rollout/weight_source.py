"""Weights that a test gives to engines, as a trainer of one rank does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from verl.rollout.weight_stream import ExportCall, WeightStream, stream_buckets
from verl.weight_sync.buckets import MIB, Version, plan_buckets
from verl.weight_sync.memory import HostBuckets


def stream_of(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    bucket_mib: float = 512,
) -> WeightStream:
    named = dict(named_tensors)
    memory = HostBuckets(folder, int(bucket_mib * MIB))
    plan = plan_buckets(named.items(), dtype, bucket_mib)

    @torch.no_grad()
    def export(index: int) -> ExportCall:
        exported = memory.export(Version(named, plan, dtype, version), index)
        return lambda: [exported]

    return WeightStream(stream_buckets(export), memory.release)


def some_weights() -> dict[str, torch.Tensor]:
    """Rows that two or three ranks cannot share evenly, or at all."""
    draw = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(7, 5, generator=draw),
        "norm.weight": torch.randn(5, generator=draw),
        "wide.weight": torch.randn(1, 3000, generator=draw),
        "proj.weight": torch.randn(100, 300, generator=draw),
        "steps": torch.tensor(12),
    }
