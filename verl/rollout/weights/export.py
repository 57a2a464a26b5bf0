"""The trainer's side of weight sync: cuts a model into buckets and lays each where the engines can read it."""

from __future__ import annotations

from pathlib import Path

import torch

from verl.config import Config
from verl.engine.device import DTYPES
from verl.rollout.weights.buckets import MIB, Version, plan_buckets
from verl.rollout.weights.checksum import NamedTensors
from verl.rollout.weights.exported import ExportedWeights
from verl.rollout.weights.ipc import DeviceBuckets
from verl.rollout.weights.memory import HostBuckets


class WeightExporter:
    """One rank of the trainer. Engines on the same GPU read GPU memory, all others what the host's processes share.

    An engine that chooses its number format itself ("auto") is given float32 and casts.
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
        """Bucket `index`, this rank's part. All ranks call it with the same arguments, bucket after bucket.

        dtype: of what is sent, where it is not the engines' format.

        Raises `NumericalError` naming the first weight that has a NaN or an Inf, and `WeightSyncError` when there is
        not enough memory for buckets.
        """
        named, dtype = dict(named_tensors), dtype or self.dtype
        plan = plan_buckets(named.items(), dtype, self.bucket_mib)
        return self.buckets.export(Version(named, plan, dtype, version), index)

    def release(self) -> None:
        """After the last bucket, or after a failure."""
        self.buckets.release()

    def close(self) -> None:
        """Leave nothing behind."""
        self.buckets.close()
