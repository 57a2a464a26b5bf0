"""All-reduce over the GPUs of the node by NCCL (over processes by gloo on CPU): right sums, and the bandwidth."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from first_run.child import run_child
from first_run.result import Result, judged
from verl.engine.device.runtime import init_process_group

MIB = 2**20
SIZES = {"cuda": (1, 64, 1024), "cpu": (1, 4)}  # MiB of bfloat16
TIMES = 10


def check(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        passed = (args.ranks, args.device, folder)
        torch.multiprocessing.spawn(rank_of_many, passed, args.ranks)
        lines = Path(folder, "found").read_text().splitlines()
    rates = [float(line.split()[1]) for line in lines]
    right = all(line.split()[2] == "True" for line in lines)
    table = ["| MiB | bus bandwidth, GB/s |", "|---|---|", *(f"| {x.split()[0]} | {x.split()[1]} |" for x in lines)]
    hint = "NVLink: hundreds of GB/s, PCIe: 10 to 50" if args.device == "cuda" else "gloo"
    figures = f"{args.ranks} ranks, bus bandwidth up to {max(rates):.1f} GB/s ({hint})"
    return judged(right, figures if right else "the sum is wrong", "\n".join(table))


def rank_of_many(rank: int, num_ranks: int, device_type: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    init_process_group(rank, num_ranks, f"file://{folder}/store", device, timeout_s=120.0)
    found = [f"{mib} {rate:.2f} {right}" for mib in SIZES[device_type] for rate, right in [measured(mib, device)]]
    if rank == 0:
        Path(folder, "found").write_text("\n".join(found))
    dist.destroy_process_group()


def measured(mib: int, device: torch.device) -> tuple[float, bool]:
    """GB/s on the bus as nccl-tests count it, and whether every value is the sum over ranks."""
    num_ranks = dist.get_world_size()
    values = torch.full((mib * MIB // 2,), float(dist.get_rank() + 1), dtype=torch.bfloat16, device=device)
    dist.all_reduce(values)
    right = bool((values == num_ranks * (num_ranks + 1) / 2).all())
    values.zero_()
    for _ in range(2):  # the first ones set up the channels
        dist.all_reduce(values)
    _wait(device)
    started = time.perf_counter()
    for _ in range(TIMES):
        dist.all_reduce(values)
    _wait(device)
    seconds = (time.perf_counter() - started) / TIMES
    return 2 * (num_ranks - 1) / num_ranks * values.nbytes / seconds / 1e9, right


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


if __name__ == "__main__":
    run_child(check, ("--ranks", int))
