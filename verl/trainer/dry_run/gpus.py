"""GPUs by name: what their makers' data sheets promise (dense arithmetic), and the least time that work takes on them.

An operation takes the longer of its arithmetic and of its way through memory; operations follow each other, collectives
run beside them. A real run is slower: in large products GPUs reach 60 to 80% of the promise, and small operations wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.trainer.dry_run.work import Work

GIB = 2**30
BETWEEN_NODES = 50e9  # bytes a second of one GPU: a network card of 400 Gbit/s for each
NODE = 8  # GPUs


@dataclass(frozen=True)
class Gpu:
    """`size` as it is sold, in GB; `memory` as the driver gives it, in GiB; the rest a second."""

    name: str
    size: int
    memory: float
    bf16_flops: float
    tf32_flops: float
    memory_bytes: float
    link_bytes: float  # in one direction, to the other GPUs of the node


GPUS = (
    Gpu("A100-40", 40, 39.4, 312e12, 156e12, 1.555e12, 300e9),
    Gpu("L40S", 48, 44.4, 362e12, 183e12, 0.864e12, 32e9),
    Gpu("A100", 80, 79.1, 312e12, 156e12, 2.039e12, 300e9),
    Gpu("H100", 80, 79.1, 989e12, 494e12, 3.35e12, 450e9),
    Gpu("H200", 141, 139.8, 989e12, 494e12, 4.8e12, 450e9),
    Gpu("B200", 180, 178.3, 2250e12, 1125e12, 7.7e12, 900e9),
)


def least_seconds(work: Work, gpu: Gpu, num_ranks: int, share: float = 1.0) -> float:
    """Of one rank's work when its operations have `share` of the tokens that were counted."""
    rates = {torch.bfloat16: gpu.bf16_flops, torch.float16: gpu.bf16_flops}
    computing = sum(
        max(operation.flops / rates.get(operation.dtype, gpu.tf32_flops), operation.num_bytes / gpu.memory_bytes)
        for operation in work.operations
    )
    return max(computing * share, sending_seconds(work, gpu, num_ranks))


def sending_seconds(work: Work, gpu: Gpu, num_ranks: int) -> float:
    """In rings; an all-reduce goes round twice."""
    link = gpu.link_bytes if num_ranks <= NODE else min(gpu.link_bytes, BETWEEN_NODES)
    rounds = {"all-reduce": 2.0}
    sent = sum(rounds.get(kind, 1.0) * num_bytes for kind, num_bytes in work.sent.items())
    return sent * (num_ranks - 1) / num_ranks / link
