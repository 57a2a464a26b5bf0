"""Weight sync, bucket by bucket: what a rank holds beside its shard, and how fast buckets are gathered and checked.

    .venv/bin/python scripts/bench/weight_sync.py --gib 2 --ranks 2

Random float32 weights of `--gib` in decoder layers, sharded over the ranks by rows; each bucket is cast to bfloat16,
gathered and given its checksum, as a rank of the actor does for the engine on its device. `--device cuda`: one
rank a GPU. In turn with it: a copy of as many bytes within the memory (on CPU within shared memory).
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard

from verl.engine.device import device_mesh, init_process_group, resolve_device
from verl.rollout.weight_buckets import gathered, plan_buckets
from verl.rollout.weight_file import checksum
from verl.rollout.weight_ipc import bit_sum

HIDDEN, MLP = 2048, 8192
SQUARE, WIDE = (HIDDEN, HIDDEN), (MLP, HIDDEN)
LAYER = {
    **{f"self_attn.{part}_proj": SQUARE for part in "qkvo"},
    **{f"mlp.{part}_proj": WIDE for part in ("gate", "up")},
}
LAYER_BYTES = 4 * sum(rows * columns for rows, columns in LAYER.values())
GIB, MIB = 2**30, 2**20
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="float32 weights of the whole model, GiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket_mib", type=int, default=512)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options, folder), options.ranks)


def measure(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank; the first one tells."""
    torch.set_num_threads(1)
    device = resolve_device(options.device, rank)
    init_process_group(rank, options.ranks, f"file://{folder}/store", device)
    weights = make_weights(options, device)
    names = plan_buckets(weights.items(), torch.bfloat16, options.bucket_mib)
    moved = sum(tensor.numel() for tensor in weights.values()) * 2
    for _ in range(ROUNDS):
        dist.barrier()
        with peak_above(device) as peak:
            start = time.perf_counter()
            for bucket in names:
                checksum(gathered([(name, weights[name]) for name in bucket], torch.bfloat16).items(), bit_sum)
            seconds = time.perf_counter() - start
        copied = copy_speed(options.bucket_mib * MIB, device)
        if rank == 0:
            print(
                f"{len(names)} buckets of {options.bucket_mib} MiB: {moved / seconds / 1e9:.2f} GB/s, a copy in memory "
                f"{copied / 1e9:.2f} GB/s; peak above the shard {peak[0] / options.bucket_mib / MIB:.2f} buckets"
            )
    dist.destroy_process_group()


def make_weights(options: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's rows of every weight."""
    mesh = device_mesh(device)
    named = {}
    for layer in range(max(1, round(options.gib * GIB / LAYER_BYTES))):
        for part, (rows, columns) in LAYER.items():
            own = torch.randn(rows // options.ranks, columns, device=device)
            named[f"model.layers.{layer}.{part}.weight"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    return dict(named)


@contextmanager
def peak_above(device: torch.device) -> Iterator[list[float]]:
    """Most bytes in use in the block, above what was in use before; known afterwards."""
    found = [0.0]
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield found
        torch.cuda.synchronize()
        found[0] = torch.cuda.max_memory_allocated() - before
        return
    done = threading.Event()
    before = resident()

    def watch() -> None:
        while not done.wait(0.002):
            found[0] = max(found[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield found
    done.set()
    watcher.join()


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096.0


def copy_speed(num_bytes: int, device: torch.device) -> float:
    """Bytes per second of a copy on the device; on CPU into shared memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type == "cpu":
        target = target.share_memory_()
    target.copy_(source)  # the pages are there now
    start = time.perf_counter()
    target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return num_bytes / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
