"""The trainer's side of weight sync: splits a model into buckets and puts each where the engines can read it.

Of a model with adapters only A and (alpha / r) B are sent, in float32; the engines merge them. An engine reads the base
weights from the model's files each time, which its host's page cache keeps for all engines there. So each merge starts
from the exact base: rounding errors do not accumulate over versions, and an engine whose weights were dropped while it
slept gets all of them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from verl.config import Config
from verl.engine.device.runtime import DTYPES
from verl.engine.device.sharding import on_mesh
from verl.engine.files.checksum import NamedTensors
from verl.engine.lora import adapted_layers, merge
from verl.engine.model import Decoder, ReferencePolicy
from verl.errors import WeightSyncError
from verl.weight_sync.buckets import MIB, ExportedWeights, Version, plan_buckets
from verl.weight_sync.ipc import DeviceBuckets
from verl.weight_sync.memory import HostBuckets


class WeightExporter:
    """Exports for one rank of the trainer. Engines on the same GPU read GPU memory, others the host's shared memory.

    An engine that chooses its own number format ("auto") gets float32 and casts it.
    """

    def __init__(self, config: Config, device: torch.device, folder: Path) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.dtype = DTYPES.get(rollout.dtype, torch.float32)
        self.bucket_mib = rollout.weight_sync.bucket_mib
        on_its_gpu = device.type == "cuda" and config.trainer.layout == "colocated"
        self.buckets = DeviceBuckets(device) if on_its_gpu else HostBuckets(folder, self.bucket_mib * MIB)

    @torch.no_grad()
    def export(
        self, named_tensors: NamedTensors, version: int, index: int, dtype: torch.dtype | None = None
    ) -> ExportedWeights:
        """Export this rank's part of bucket `index`. All ranks call it with the same arguments, bucket by bucket.

        dtype: number format to send, if not the engines' format.

        Raises `NumericalError` naming the first weight that has a NaN or an Inf, and `WeightSyncError` when there is
        not enough memory for buckets.
        """
        named, dtype = dict(named_tensors), dtype or self.dtype
        plan = plan_buckets(named.items(), dtype, self.bucket_mib)
        return self.buckets.export(Version(named, plan, dtype, version), index)

    def release(self) -> None:
        """Free a bucket's memory where it is short; to be called after the last bucket, or after a failure."""
        self.buckets.release()

    def close(self) -> None:
        """Release all shared memory."""
        self.buckets.close()


A, B = ".lora_A", ".lora_B"


def adapters_of(model: Decoder | ReferencePolicy) -> dict[str, torch.Tensor]:
    """A and (alpha / r) B, still sharded, by the name of the layer's weight in the files; {} without adapters.

    For a reference policy, B is zero.
    """
    found: dict[str, torch.Tensor] = {}
    for _, layer in adapted_layers(model.model):
        scale = 0.0 if isinstance(model, ReferencePolicy) else layer.lora.scale
        found[layer.stored_name + A] = on_mesh(layer.lora_A)
        found[layer.stored_name + B] = scale * on_mesh(layer.lora_B)
    return found


def are_adapters(names: Iterable[str]) -> bool:
    """Whether a bucket with these names holds adapters; a bucket holds only adapters or none."""
    return any(name.endswith((A, B)) for name in names)


def with_adapters(
    base: Iterable[tuple[str, torch.Tensor]], adapters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of `base` by their names in the files; those with an adapter are merged on the adapter's device.

    Raises WeightSyncError at the end if a weight with an adapter is missing in `base`.
    """
    left = {name.removesuffix(A) for name in adapters if name.endswith(A)}
    for name, weight in base:
        if name in left:
            left.discard(name)
            scaled_B = adapters[name + B]
            weight = merge(weight.to(scaled_B.device), scaled_B, adapters[name + A])
        yield name, weight
    if left:
        raise WeightSyncError(
            f"{len(left)} weights with adapters are not in the files that the engine reads, the first is {min(left)}: "
            "trainer and engine must load the same model"
        )
