"""The trainer's side of weight sync: splits a model into buckets and puts each where the engines can read it."""

from __future__ import annotations

from pathlib import Path

import torch

from verl.config import Config
from verl.engine.device.runtime import DTYPES
from verl.engine.files.checksum import NamedTensors
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
